// Buttons that copy a text.

import { button, h, say } from "./dom.js";

const SHOWN_MS = 1500;

/** A button that copies what `text()` gives, and says so. */
export function copy(label, text, name = label) {
  return button(label, async (pressed) => {
    await write(text());
    pressed.textContent = "Copied";
    say("Copied");
    setTimeout(() => { pressed.textContent = label; }, SHOWN_MS);
  }, { class: "quiet", "aria-label": name, failed: () => say("The browser does not let the page copy.") });
}

/** A page that came without TLS from another machine has no clipboard of its own: there the old way works. */
async function write(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = h("textarea", { class: "unseen", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}
