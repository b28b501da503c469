// A tree of any length: only the rows in view are elements. Arrow keys go as in any tree.

import { h } from "./dom.js";

const ROW = 32;
const SPARE = 6;

/**
 * `cells(node)` gives a row's elements; `chosen(node)` is called with the node that is chosen. Nodes stand before
 * their children: {depth, open, index, end: index behind the last one below it, above, place and beside: of its like}.
 */
export class VirtualTree {
  constructor(name, { cells, chosen }) {
    this.cells = cells;
    this.chosen = chosen;
    this.nodes = [];
    this.rows = [];
    this.at = 0;
    this.space = h("div", { class: "space", role: "presentation" });
    this.element = h("div", { class: "tree", role: "tree", tabindex: 0, "aria-label": name, onkeydown: (event) => this.key(event), onscroll: () => this.later() }, this.space);
    this.frame = 0;
    new ResizeObserver(() => this.later()).observe(this.element);
  }

  show(nodes) {
    this.nodes = nodes;
    this.at = 0;
    this.element.scrollTop = 0;
    this.layOut();
  }

  /** Which rows there are, as nodes are open or closed. */
  layOut() {
    this.rows = [];
    for (let index = 0; index < this.nodes.length; ) {
      const node = this.nodes[index];
      this.rows.push(node);
      index = node.open ? index + 1 : node.end;
    }
    this.at = Math.min(this.at, Math.max(0, this.rows.length - 1));
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.element.style.height = `${this.rows.length * ROW + 2}px`; // CSS has the most.
    this.draw();
  }

  later() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const { scrollTop, clientHeight } = this.element;
    const from = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const to = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    const made = [];
    for (let at = from; at < to; at += 1) made.push(this.row(this.rows[at], at));
    this.space.replaceChildren(...made);
    const active = this.space.querySelector(".active");
    if (active) this.element.setAttribute("aria-activedescendant", active.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  row(node, at) {
    const active = at === this.at;
    const inner = node.end > node.index + 1;
    const row = h("div", {
      class: `tree-row${active ? " active" : ""}`, id: `node-${node.index}`, role: "treeitem", "aria-level": node.depth + 1,
      "aria-setsize": node.beside, "aria-posinset": node.place, "aria-selected": String(active),
      "aria-expanded": inner ? String(node.open) : null,
      onclick: (event) => {
        this.at = at;
        if (inner && event.target.closest(".twist")) this.toggle(node);
        else this.draw();
        this.chosen(node);
      },
    }, h("span", { class: "twist", "aria-hidden": "true" }, inner ? (node.open ? "▾" : "▸") : ""), ...this.cells(node));
    row.style.top = `${at * ROW}px`;
    row.firstChild.style.marginInlineStart = `${Math.min(node.depth, 16) * 0.9}rem`;
    return row;
  }

  toggle(node, open = !node.open) {
    node.open = open;
    this.layOut();
  }

  /** Make `node` a row that is seen. */
  reveal(node) {
    for (let above = node.above; above; above = above.above) above.open = true;
    this.layOut();
    this.go(this.rows.indexOf(node));
  }

  go(at) {
    if (!this.rows.length) return;
    this.at = Math.max(0, Math.min(this.rows.length - 1, at));
    const top = this.at * ROW;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.element.scrollTop = top + ROW - clientHeight;
    this.draw();
    this.chosen(this.rows[this.at]);
  }

  key(event) {
    const node = this.rows[this.at];
    const inner = node && node.end > node.index + 1;
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!node || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in steps) this.go(this.at + steps[event.key]);
    else if (event.key === "ArrowRight" && inner) node.open ? this.go(this.at + 1) : this.toggle(node);
    else if (event.key === "ArrowLeft" && inner && node.open) this.toggle(node);
    else if (event.key === "ArrowLeft" && node.above) this.go(this.rows.indexOf(node.above));
    else if (event.key === "Enter" || event.key === " ") this.chosen(node);
    else return;
    event.preventDefault();
  }
}
