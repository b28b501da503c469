// Markdown as models write it, into elements. No HTML of a text is ever read as HTML, no address is loaded.

import { colour, formula } from "./colours.js";
import { copy } from "./copy.js";
import { h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const TASK = /^\[([ xX])\]\s+/;
const DEEPEST = 12;
const MOST_FORMULA_LINES = 60;

/** Lines of which blocks are made in one turn, and letters that are looked through for them. */
const PIECE = 300;
const WINDOW = 1 << 16;
const LETTERS = 1 << 13; // of a piece of plain text
const MOST_LINES = 200; // of a block: a longer one is shown as several.
const GROWING = 2; // blocks at the end that may change as the text grows.

// Who has pieces to make, each in a turn of its own. A message comes sooner than a timer, several in a frame.
const waiting = new Set();
const turns = new MessageChannel();
turns.port1.onmessage = () => {
  const [next] = waiting;
  waiting.delete(next);
  next?.work();
};

function soon(rendered) {
  if (waiting.has(rendered)) return;
  waiting.add(rendered);
  turns.port2.postMessage(null);
}

/**
 * An element that shows a growing text: `show(text)` makes only the blocks that changed, and a piece of them at
 * a time, so that no text holds the page.
 */
export class Rendered {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.blocks = []; // {source, node, start}
    this.former = []; // of the text before, at the end, which may be the same still
    this.at = 0; // Up to here the text has blocks.
  }

  show(text) {
    if (text === this.text) return;
    const grows = text.startsWith(this.text);
    const open = this.blocks.splice(grows ? Math.max(0, this.blocks.length - GROWING) : 0);
    this.at = open[0]?.start ?? this.at;
    if (!grows) this.at = 0;
    this.former = [...open, ...this.former];
    this.text = text;
    this.work();
  }

  /** Make a piece; the next one follows once the page has done what else it has to do. */
  work() {
    for (let room = PIECE; this.at < this.text.length && room > 0; ) {
      const { found, end } = this.next();
      let taken = 0;
      for (; taken < found.length && room > 0; taken += 1) {
        this.put(found[taken]);
        room -= found[taken].kind === "code" ? 1 : found[taken].lines.length;
      }
      if (!found.length) room -= 1;
      this.at = found[taken]?.start ?? end;
    }
    if (this.at < this.text.length) {
      soon(this);
      return;
    }
    for (const gone of this.former.splice(0)) gone.node.remove();
  }

  /** The next blocks, at most PIECE, and where the text behind them begins. */
  next() {
    for (let size = WINDOW; ; size *= 2) {
      const isAll = this.at + size >= this.text.length;
      const part = this.text.slice(this.at, this.at + size);
      const all = part.replace(/\r(?!\n)/g, "\n").split("\n");
      const starts = [];
      let from = this.at;
      for (const line of all) {
        starts.push(from);
        from += line.length + 1;
      }
      const parts = split(all.map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line)), PIECE + GROWING);
      for (const block of parts) block.start = starts[block.from];
      const cut = parts.length > PIECE;
      if (!cut && isAll) return { found: parts, end: this.text.length };
      const found = cut ? parts.slice(0, PIECE) : parts.slice(0, -GROWING);
      if (found.length) return { found, end: parts[found.length].start };
    }
  }

  put(block) {
    const same = this.former[0]?.source === block.source ? this.former.shift() : null;
    if (!same) for (const gone of this.former.splice(0)) gone.node.remove();
    const node = same?.node ?? render(block, 0);
    if (!same) {
      if (block.kind !== "code") node.dir = "auto";
      this.place().append(node);
    }
    this.blocks.push({ source: block.source, node, start: block.start });
  }

  /** Where the next block goes. Far down those out of sight are not laid out. */
  place() {
    if (this.blocks.length < PIECE) return this.element;
    const last = this.element.lastElementChild;
    if (last?.classList.contains("piece") && last.childElementCount < PIECE) return last;
    return this.element.appendChild(h("div", { class: "piece" }));
  }
}

/** An element that shows a growing text as it is, of any length. */
export class Plain {
  constructor(element) {
    this.element = element;
    this.text = "";
  }

  show(text) {
    if (!text.startsWith(this.text)) {
      this.element.replaceChildren();
      this.text = "";
    }
    for (let at = this.text.length; at < text.length; ) {
      let last = this.element.lastElementChild?.firstChild;
      // A piece ends with a line, as each stands in a line of its own.
      if (!last || (last.length >= LETTERS && last.data.endsWith("\n")) || last.length >= WINDOW) {
        last = document.createTextNode("");
        this.element.append(h("div", { class: "piece", dir: "auto" }, last));
      }
      const from = at + Math.max(0, LETTERS - last.length);
      const line = text.indexOf("\n", from);
      const end = line < 0 || line > from + WINDOW ? Math.min(text.length, from + WINDOW) : line + 1;
      last.appendData(text.slice(at, end));
      at = end;
    }
    this.text = text;
  }
}

/** Blocks of `lines`, at most `most`: {kind, lines, source, from: its first line, …}. */
function split(lines, most = Infinity) {
  const found = [];
  const add = (kind, from, to, more = {}) =>
    found.push({ kind, lines: lines.slice(from, to), source: kind + lines.slice(from, to).join("\n"), from, ...more });
  for (let at = 0; at < lines.length && found.length < most; ) {
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
    } else if (formulaEnd(lines, at)) {
      at = formulaEnd(lines, at);
      add("formula", from, at);
    } else if (HEADING.test(line)) {
      add("heading", from, ++at);
    } else if (RULE.test(line)) {
      add("rule", from, ++at);
    } else if (QUOTE.test(line)) {
      while (at < lines.length && at - from < MOST_LINES && lines[at].trim() && (QUOTE.test(lines[at]) || !starts(lines[at]))) at += 1;
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
        if (at - from >= MOST_LINES && next.trim() && item && (item[1].length <= match[1].length + 1 || at - from >= 2 * MOST_LINES)) break;
        at += 1;
      }
      add("list", from, at);
    } else if (line.includes("|") && at + 1 < lines.length && TABLE.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      at += 2;
      while (at < lines.length && lines[at].includes("|")) at += 1;
      add("table", from, at);
    } else {
      at += 1;
      while (at < lines.length && at - from < MOST_LINES && lines[at].trim() && !starts(lines[at])) at += 1;
      add("text", from, at);
    }
  }
  return found;
}

/** Behind the last line of the formula that begins with line `at`, or 0. */
function formulaEnd(lines, at) {
  const begin = /^\s*(\$\$|\\\[)/.exec(lines[at]);
  if (!begin) return 0;
  const close = begin[1] === "$$" ? "$$" : "\\]";
  for (let end = at; end < Math.min(lines.length, at + MOST_FORMULA_LINES); end += 1) {
    const rest = end === at ? lines[at].slice(begin[0].length) : lines[end];
    if (rest.trimEnd().endsWith(close)) return end + 1;
    if (rest.includes(close)) return 0;
  }
  return 0;
}

/** Of the same depth, but with another mark: it begins another list. */
const isOther = ([, indent, mark], [, first, firstMark]) => indent.length <= first.length + 1 && mark.at(-1) !== firstMark.at(-1);

const starts = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function render(block, depth) {
  const { kind, lines } = block;
  if (depth > DEEPEST) return h("p", {}, lines.join("\n"));
  if (kind === "code") return code(lines.slice(1, block.ended ? -1 : undefined).join("\n"), block.language, block.ended);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return h(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)); // The page has levels 1 and 2.
  }
  if (kind === "formula") {
    const written = lines.join("\n").trim();
    return formula(written.slice(2, -2), written, true);
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
  const body = h("tbody", {});
  const more = (at) => {
    body.append(...lines.slice(at, at + MOST_LINES).map((line) => row("td", line)));
    if (at + MOST_LINES < lines.length) setTimeout(() => { if (at === 2 || body.isConnected) more(at + MOST_LINES); });
  };
  more(2);
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", lines[0])), body));
}

/** A block of code with a button that copies it; `ended`: it is whole, and gets its colours. */
export function code(text, language = "", ended = true) {
  const shown = h("code", {}, text);
  if (ended) colour(shown, text, language.toLowerCase());
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy("Copy", () => text, "Copy code")),
    h("pre", { tabindex: 0 }, shown));
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
  [/\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\]|\$\$[\s\S]+?\$\$/, (m) => formula(m[0].slice(2, -2), m[0], false)],
  // A price is no formula: that has a letter alone, or a sign of one.
  [/(?<![\\$\w])\$(?=[^\s$])((?:[^$\n\\]|\\[^\n]){0,300}?[^\s$\\]|[A-Za-z])\$(?![\w$])/, (m) => (/^[A-Za-z]$|[\\^_={}<>+]/.test(m[1]) ? formula(m[1], m[0], false) : m[0])],
  [/\\([!-/:-@[-`{-~])/, (m) => m[1]],
  [/&(lt|gt|amp|quot|nbsp|#39);/, (m) => ENTITIES[m[1]]],
  [/ {2,}\n|<br ?\/?>/i, () => h("br")],
];
const PATTERNS = INLINE.map(([pattern]) => new RegExp(pattern, `g${pattern.flags}`));
const SPECIAL = /[`*_~\\$<&[]|https?:| {2}\n/; // Without any of these a text is plain.
const LONGEST = 8000;

/** The nodes and strings of a paragraph's text. */
function inline(text, deep = 0) {
  if (deep > DEEPEST || text.length > LONGEST) return [text];
  const made = [];
  if (!SPECIAL.test(text)) return [text];
  // For each kind its next match; looked for again only once it was passed.
  const next = PATTERNS.map((pattern) => ({ pattern, match: undefined }));
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
