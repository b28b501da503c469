// Elements, made without HTML in strings: no text of a model, a file or a server becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. A property `onX` is a listener, `true` an empty attribute; false, null and undefined are none. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Likewise, of SVG. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...there(children));
  return element;
}

const there = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false);

/** Have `element` hold these and nothing else. */
export function put(element, ...children) {
  element.replaceChildren(...there(children));
}

/** Have `draw` make the insides of `container` anew; whoever stands on a button of it (`data-act`) stays there. */
export function redraw(container, draw) {
  const act = container.contains(document.activeElement) ? document.activeElement.dataset.act : undefined;
  draw();
  if (act === undefined) return;
  container.tabIndex = -1; // The button may be gone.
  (container.querySelector(`[data-act="${CSS.escape(act)}"]`) ?? container).focus({ preventScroll: true });
}

/** Tell whoever listens to the page. */
export function say(sentence) {
  document.getElementById("say").textContent = sentence;
}

/** A button that can't be pressed twice at once; what `act` throws goes to `failed`. */
export function button(label, act, { failed = () => {}, ...properties } = {}) {
  const made = h("button", { type: "button", ...properties }, label);
  made.addEventListener("click", async () => {
    if (made.getAttribute("aria-disabled") === "true") return;
    made.setAttribute("aria-disabled", "true");
    try {
      await act(made);
    } catch (error) {
      failed(error);
    } finally {
      made.removeAttribute("aria-disabled");
    }
  });
  return made;
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Bytes, in powers of 1,000 as the daemon writes them. */
export function bytes(count) {
  if (!Number.isFinite(count)) return "–";
  let unit = 0;
  while (Math.abs(count) >= 999.5 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 99.95 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

const plain = new Intl.NumberFormat("en-US");

export const number = (count) => (Number.isFinite(count) ? plain.format(Math.round(count)) : "–");

/** "1 run", "2 runs". */
export const counted = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

/** A stranger's text in one line of at most so many letters; none of them is unseen, or turns the line round. */
export function tame(text, most = 80) {
  const letters = [...text.slice(0, 8 * most).replace(/[\s\p{C}\p{Z}]+/gu, " ").trim()];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : letters.join("");
}

/** Seconds: 12 ms, 1.25 s, 3 min 20 s. */
export function seconds(count) {
  if (!Number.isFinite(count)) return "–";
  if (count < 0.0995) return `${Math.round(count * 1000)} ms`;
  if (count < 9.95) return `${count.toFixed(2)} s`;
  if (count < 119.5) return `${count.toFixed(count < 60 ? 1 : 0)} s`;
  if (count < 7200) return `${Math.floor(count / 60)} min ${Math.floor(count % 60)} s`;
  return `${Math.floor(count / 3600)} h ${Math.floor((count % 3600) / 60)} min`;
}

/** How long ago `when` was, seconds since 1970. */
export function ago(when) {
  if (!when) return "–";
  const past = Math.max(0, Date.now() / 1000 - when);
  for (const [length, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (past >= length) return `${Math.round(past / length)} ${name} ago`;
  }
  return `${Math.round(past)} s ago`;
}
