// Colours of code and formulas, by libraries that come with the page and are loaded when the first is met.

import { h } from "./dom.js";

const MOST_CODE = 60000;
const MOST_FORMULA = 3000;
const DEEPEST = 40;

const loaded = new Map();

/** The library `name`, or null until it is here; then `ready` is called. */
function library(name, ready) {
  const known = loaded.get(name);
  if (known && !(known instanceof Promise)) return known;
  if (!known) {
    loaded.set(name, import(`./${name}.min.js`).then((module) => { loaded.set(name, module.default); }, () => { loaded.delete(name); }));
  }
  loaded.get(name)?.then(() => { if (loaded.has(name) && !(loaded.get(name) instanceof Promise)) ready(); });
  return null;
}

/** Give the `text` that `element` shows the colours of its language, where it is one that is known. */
export function colour(element, text, language) {
  if (!language || text.length > MOST_CODE) return;
  const found = library("highlight", () => colour(element, text, language));
  if (!found?.getLanguage(language)) return;
  try {
    // Its tree, never its HTML.
    const { rootNode } = found.highlight(text, { language, ignoreIllegals: true })._emitter;
    element.replaceChildren(...coloured(rootNode.children, 0));
  } catch {
    element.textContent = text;
  }
}

const coloured = (children, depth) => children.map((child) => {
  if (typeof child === "string") return child;
  const inner = depth > DEEPEST ? [plain(child)] : coloured(child.children, depth + 1);
  return child.scope ? h("span", { class: `c-${child.scope.split(/[.:]/)[0]}` }, ...inner) : h("span", {}, ...inner);
});

const plain = (node) => (typeof node === "string" ? node : node.children.map(plain).join(""));

/** An element with a formula in TeX, as it was written until it can be drawn, or if it can't. */
export function formula(tex, written, display) {
  const element = h(display ? "div" : "span", { class: "formula" }, written);
  drawFormula(element, tex, written, display);
  return element;
}

function drawFormula(element, tex, written, display) {
  if (tex.length > MOST_FORMULA) return;
  const temml = library("temml", () => drawFormula(element, tex, written, display));
  if (!temml) return;
  try {
    temml.render(tex, element, { displayMode: display, throwOnError: true, trust: false, maxExpand: 300, maxSize: [20, 40] });
    element.setAttribute("title", written);
  } catch {
    element.textContent = written;
  }
}
