// Markdown as models write it, into elements. No HTML of a text is ever read as HTML, no address is loaded.

import { button, h, say } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const TASK = /^\[([ xX])\]\s+/;
const DEEPEST = 12;

/** An element that shows a growing text: `show(text)` renders anew only the blocks that changed. */
export class Rendered {
  constructor(element) {
    this.element = element;
    this.blocks = [];
  }

  show(text) {
    const sources = split(text.replace(/\r\n?/g, "\n").split("\n"));
    let same = 0;
    while (same < sources.length && same < this.blocks.length && this.blocks[same].source === sources[same].source) same += 1;
    for (const gone of this.blocks.splice(same)) gone.node.remove();
    for (const block of sources.slice(same)) {
      const node = render(block, 0);
      if (block.kind !== "code") node.dir = "auto";
      this.blocks.push({ source: block.source, node });
      this.element.append(node);
    }
  }
}

/** Blocks of `lines`: {kind, lines, source, …}. */
function split(lines) {
  const found = [];
  const add = (kind, from, to, more = {}) =>
    found.push({ kind, lines: lines.slice(from, to), source: kind + lines.slice(from, to).join("\n"), ...more });
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const from = at;
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, mark, language] = match;
      const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
      at += 1;
      while (at < lines.length && !end.test(lines[at])) at += 1;
      at = Math.min(at + 1, lines.length);
      add("code", from, at, { language: language.trim().split(/\s/)[0], ended: end.test(lines[at - 1]) && at - from > 1 });
    } else if (HEADING.test(line)) {
      add("heading", from, ++at);
    } else if (RULE.test(line)) {
      add("rule", from, ++at);
    } else if (QUOTE.test(line)) {
      while (at < lines.length && lines[at].trim() && (QUOTE.test(lines[at]) || !starts(lines[at]))) at += 1;
      add("quote", from, at);
    } else if ((match = ITEM.exec(line))) {
      at += 1;
      while (at < lines.length) {
        const next = lines[at];
        const item = ITEM.exec(next.trim() ? next : lines[at + 1] ?? "");
        const goesOn = next.trim()
          ? item || /^\s{2,}/.test(next) || (lines[at - 1].trim() && !starts(next))
          : item || /^\s{2,}\S/.test(lines[at + 1] ?? "");
        if (!goesOn || (item && isOther(item, match))) break;
        at += 1;
      }
      add("list", from, at);
    } else if (line.includes("|") && at + 1 < lines.length && TABLE.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      at += 2;
      while (at < lines.length && lines[at].includes("|")) at += 1;
      add("table", from, at);
    } else {
      at += 1;
      while (at < lines.length && lines[at].trim() && !starts(lines[at])) at += 1;
      add("text", from, at);
    }
  }
  return found;
}

/** Of the same depth, but with another mark: it begins another list. */
const isOther = ([, indent, mark], [, first, firstMark]) => indent.length <= first.length + 1 && mark.at(-1) !== firstMark.at(-1);

const starts = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function render(block, depth) {
  const { kind, lines } = block;
  if (depth > DEEPEST) return h("p", {}, lines.join("\n"));
  if (kind === "code") return code(lines.slice(1, block.ended ? -1 : undefined).join("\n"), block.language);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return h(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)); // The page has levels 1 and 2.
  }
  if (kind === "rule") return h("hr");
  if (kind === "quote") return h("blockquote", {}, nested(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (kind === "list") return list(lines, depth);
  if (kind === "table") return table(lines);
  return h("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
}

const nested = (lines, depth) => split(lines).map((block) => render(block, depth + 1));

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) items.push({ width: match[0].length || 2, lines: [line.slice(match[0].length).replace(TASK, (_, done) => (done === " " ? "☐ " : "☑ "))] });
    else {
      const item = items.at(-1);
      const blank = /^\s*/.exec(line)[0].length;
      item.lines.push(line.slice(Math.min(blank, item.width)));
    }
  }
  const ordered = /\d/.test(mark);
  return h(
    ordered ? "ol" : "ul",
    ordered && parseInt(mark, 10) !== 1 ? { start: parseInt(mark, 10) } : {},
    ...items.map((item) => h("li", {}, ...tight(nested(item.lines, depth)))),
  );
}

// An item of one paragraph is text, without a paragraph's space.
const tight = (nodes) => (nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes);

function table(lines) {
  const cells = (line) =>
    line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "middle" : "right"));
  const row = (tag, line) => {
    const found = cells(line);
    return h("tr", {}, ...sides.map((side, at) => h(tag, { class: side || null }, ...inline(found[at] ?? ""))));
  };
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", lines[0])), h("tbody", {}, ...lines.slice(2).map((line) => row("td", line)))));
}

/** A block of code with a button that copies it. */
export function code(text, language = "") {
  const copy = button("Copy", async (pressed) => {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
    say("Copied");
    setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
  }, { class: "quiet", "aria-label": "Copy code", failed: () => say("The browser does not let the page copy.") });
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabindex: 0 }, h("code", {}, text)));
}

const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', nbsp: "\u00a0", "#39": "'" };
const INLINE = [
  [/(?<!`)(`+)(?!`)([\s\S]+?)(?<!`)\1(?!`)/, (m) => h("code", {}, m[2].replace(/^ (.+) $/, "$1"))],
  [/!?\[([^\][]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/, (m, deep) => link(m[2], inline(m[1], deep))],
  [/<(https?:\/\/[^\s<>]+)>/, (m) => link(m[1], [m[1]])],
  [/(?<![\w/])https?:\/\/[^\s<>"'`\])}]*[\w/#=&-]/, (m) => link(m[0], [m[0]])],
  [/\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, (m, deep) => h("strong", {}, ...inline(m[1], deep))],
  [/(?<!\w)__(?=\S)([\s\S]*?\S)__(?!\w)/, (m, deep) => h("strong", {}, ...inline(m[1], deep))],
  [/~~(?=\S)([\s\S]*?\S)~~/, (m, deep) => h("del", {}, ...inline(m[1], deep))],
  [/\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (m, deep) => h("em", {}, ...inline(m[1], deep))],
  [/(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (m, deep) => h("em", {}, ...inline(m[1], deep))],
  [/\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\]|\$\$[\s\S]+?\$\$/, (m) => m[0]], // A formula, as it was written.
  [/\\([!-/:-@[-`{-~])/, (m) => m[1]],
  [/&(lt|gt|amp|quot|nbsp|#39);/, (m) => ENTITIES[m[1]]],
  [/ {2,}\n|<br ?\/?>/i, () => h("br")],
];
const LONGEST = 8000;

/** The nodes and strings of a paragraph's text. */
function inline(text, deep = 0) {
  if (deep > DEEPEST || text.length > LONGEST) return [text];
  const made = [];
  // For each kind its next match; looked for again only once it was passed.
  const next = INLINE.map(([pattern]) => ({ pattern: new RegExp(pattern, `g${pattern.flags}`), match: undefined }));
  for (let at = 0; at < text.length; ) {
    let best = null;
    for (const [index, each] of next.entries()) {
      if (each.match === undefined || (each.match && each.match.index < at)) {
        each.pattern.lastIndex = at;
        each.match = each.pattern.exec(text);
      }
      if (each.match && (!best || each.match.index < best.match.index)) best = { match: each.match, index };
    }
    if (!best) {
      made.push(text.slice(at));
      break;
    }
    if (best.match.index > at) made.push(text.slice(at, best.match.index));
    made.push(INLINE[best.index][1](best.match, deep + 1));
    at = best.match.index + best.match[0].length;
  }
  return made;
}

/** Only addresses of the web and of mail lead anywhere, and they learn nothing of this page. */
function link(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return h("span", {}, ...children, address ? ` (${address})` : "");
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, ...children);
}
