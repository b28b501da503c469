// Charts as SVG: bars over time, and one bar that shows the parts of a whole.

import { h, s } from "./dom.js";

const HEIGHT = 100;

/**
 * Bars over time. `draw({ columns, top, parts, tell, summary, from, to })`:
 * columns  arrays of values, one a part, stacked; null: nothing was
 * top      the value at the upper edge; peaks: a mark above each bar, or none
 * tell     a sentence on a column; summary: one on all of it
 */
export function chart(title, format) {
  const drawing = s("svg", { preserveAspectRatio: "none", role: "img" });
  const upper = h("span", {});
  const left = h("span", {});
  const read = h("span", { class: "read" });
  const legend = h("p", { class: "legend" });
  let last = null;
  const tell = (event) => {
    if (!last) return;
    const box = drawing.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * last.columns.length);
    read.textContent = last.columns[at] ? last.tell(at) : "";
  };
  drawing.addEventListener("pointermove", tell);
  drawing.addEventListener("pointerleave", () => { read.textContent = last?.summary ?? ""; });
  const element = h("figure", { class: "chart" },
    h("figcaption", {}, h("h3", {}, title), read),
    h("div", { class: "plot" }, h("div", { class: "axis" }, upper, h("span", {}, format(0))), drawing),
    h("p", { class: "times" }, left, h("span", {}, "now")), legend);
  return {
    element,
    draw(data) {
      last = data;
      const { columns, parts, top, peaks = [], summary, from } = data;
      const width = columns.length;
      drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      drawing.setAttribute("aria-label", `${title}: ${summary}`);
      upper.textContent = format(top);
      left.textContent = from;
      if (!drawing.matches(":hover")) read.textContent = summary;
      const scale = HEIGHT / ((top || 1) * 1.04);
      const made = [];
      columns.forEach((values, x) => {
        if (!values) return;
        let y = HEIGHT;
        values.forEach((value, index) => {
          const height = Math.min(y, value * scale);
          if (height <= 0) return;
          y -= height;
          made.push(s("rect", { x: x + 0.08, y, width: 0.84, height, class: parts[index][1] }));
        });
        if (peaks[x]) made.push(s("rect", { x: x + 0.08, y: Math.max(0, HEIGHT - peaks[x] * scale), width: 0.84, height: 1.5, class: "peak" }));
      });
      drawing.replaceChildren(...made);
      if (!legend.childElementCount) legend.append(...keys(parts), ...(data.more ?? []));
    },
  };
}

const keys = (parts) => parts.filter(([name]) => name).map(([name, kind]) => h("span", { class: `key ${kind}` }, name));

/** A whole of `total` and its parts: [name, class, value]. `format` writes a value. */
export function whole(label, total, parts, format) {
  const sum = parts.reduce((all, [, , value]) => all + value, 0);
  const scale = 1000 / Math.max(total, sum, 1);
  let x = 0;
  const bars = parts.map(([, kind, value]) => {
    const bar = s("rect", { x, width: Math.max(0, value) * scale, height: 10, class: kind });
    x += Math.max(0, value) * scale;
    return bar;
  });
  const told = parts.filter(([, , value]) => value > 0);
  const sentence = `${label}: ${told.map(([name, , value]) => `${format(value)} ${name}`).join(", ") || "nothing"}${total ? ` of ${format(total)}` : ""}`;
  return h("div", { class: "whole" },
    h("p", { class: "row" }, h("b", {}, label), h("span", { class: "gap" }), h("span", { class: "hint" }, total ? `${format(sum)} of ${format(total)}` : format(sum))),
    s("svg", { class: "source", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": sentence }, ...bars),
    h("p", { class: "legend", "aria-hidden": "true" }, ...told.map(([name, kind, value]) => h("span", { class: `key ${kind}` }, h("b", {}, format(value)), ` ${name}`))));
}
