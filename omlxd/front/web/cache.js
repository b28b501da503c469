// What is cached: sessions and their requests, the prefixes on SSD, why a prompt missed, pins.

import { ago, button, bytes, counted, h, number, put, redraw, say, tame } from "./dom.js";
import { json } from "./net.js";
import { VirtualTree } from "./virtual.js";

const WAIT_MS = 2000;
const MOST_TRIES = 60;
const AGAIN_MS = 3000;

let els = {};
let trees = [];
let sessions = [];
let pins = null;
let loading = null;
let again = 0;
let left = false; // Another view is shown.

export function start(section) {
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  els.sessions = h("div", { class: "sessions" });
  els.why = h("section", { class: "why", "aria-labelledby": "why-title", tabindex: -1, hidden: true });
  els.pins = h("div", {});
  els.sums = h("p", { class: "hint", role: "status" });
  els.tree = new VirtualTree("Prefixes on SSD", { cells, chosen });
  els.node = h("div", { class: "node", "aria-live": "polite" }, h("p", { class: "hint" }, "Choose a prefix to see it, or to clear it."));
  section.append(
    h("div", { class: "row" }, h("h2", {}, "Sessions"), h("span", { class: "gap" }), button("Look again", load, { failed })),
    els.problem,
    h("p", { class: "hint" }, "The last requests; their prompts are in the daemon's memory alone."),
    els.sessions, els.why,
    h("h2", {}, "Prefixes on SSD"), els.sums, els.tree.element, els.node,
    h("h2", {}, "Pinned"), h("p", { class: "hint" }, "What is pinned is evicted last."), els.pins);
}

export async function show() {
  left = false;
  try {
    await load();
  } catch (error) {
    failed(error);
  }
}

export function hide() {
  left = true;
  clearTimeout(again);
}

/** Say what failed. What is shown may be of a daemon that ended: look again, or wait until there is one. */
async function failed(error) {
  clearTimeout(again);
  if (error.status === 0) again = left ? 0 : setTimeout(show, AGAIN_MS);
  else if (error.status === 404) await load().catch(() => {});
  els.problem.textContent = error.message;
  els.problem.hidden = false;
}

/** Looks at the same time are one. */
const load = () => (loading ??= look().finally(() => { loading = null; }));

async function look() {
  els.problem.hidden = true;
  const { requests } = await json("/omlxd/requests");
  sessions = grouped(requests);
  await Promise.all([loadPins().then(drawSessions), loadTree()]);
}

async function loadPins() {
  try {
    pins = await json("/omlxd/cache/pins");
  } catch (error) {
    if (error.status !== 503) throw error;
    pins = null;
  }
  drawPins();
}

// ------------------------------------------------------------------- sessions and requests

function grouped(requests) {
  const found = new Map();
  for (const request of requests) {
    const name = request.session || `${request.model}, no session`;
    if (!found.has(name)) found.set(name, { name, named: Boolean(request.session), requests: [] });
    found.get(name).requests.push(request);
  }
  return [...found.values()];
}

const drawSessions = () => redraw(els.sessions, sessionList);
const drawPins = () => redraw(els.pins, pinList);

function sessionList() {
  const open = new Set([...els.sessions.querySelectorAll("details[open]")].map((each) => each.dataset.name));
  els.sessions.replaceChildren(...sessions.map((session, at) => {
    const known = session.requests.filter((request) => request.cached_tokens >= 0);
    const prompt = known.reduce((sum, request) => sum + request.prompt_tokens, 0);
    const cached = known.reduce((sum, request) => sum + request.cached_tokens, 0);
    const part = prompt ? `, ${Math.round((100 * cached) / prompt)}% restored` : "";
    const opening = tame(session.requests.at(-1).opening, 60);
    const shownName = tame(session.name, 40);
    return h("details", { "data-name": session.name, open: open.size ? open.has(session.name) : at === 0 },
      h("summary", {}, h("b", {}, h("bdi", {}, opening || shownName)),
        h("span", { class: "hint" }, ` ${counted(session.requests.length, "request")}, ${ago(session.requests[0].began)}${part}`, opening ? [" · ", h("bdi", {}, shownName)] : "")),
      session.named ? pinButton(session.name, { session: session.name }) : null,
      h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `Requests of ${opening || shownName}` }, h("table", {},
        h("thead", {}, h("tr", {}, ...["When", "Prompt", "Restored", "Outcome", "Model"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")))),
        h("tbody", {}, ...session.requests.map(line)))));
  }));
  if (!sessions.length) els.sessions.append(h("p", { class: "empty" }, "No request has been made since the daemon began."));
}

function line(request) {
  const known = request.cached_tokens >= 0;
  const acts = h("td", { class: "nowrap" },
    button("Why?", () => why(request), { class: "quiet", "aria-label": `Why did request ${request.id} miss`, failed }),
    button("In the tree", () => find(request), { class: "quiet", "aria-label": `Show request ${request.id} in the tree`, failed }));
  return h("tr", {}, ...[ago(request.began), known ? number(request.prompt_tokens) : "–", known ? number(request.cached_tokens) : "–", request.outcome, request.model].map((text) => h("td", { class: "nowrap" }, text)), acts);
}

function pinButton(name, asked) {
  if (!pins) return null;
  const pinned = pins.pins.some((pin) => pin.name === name);
  return button(pinned ? "Unpin" : "Pin", async () => {
    pins = await json("/omlxd/cache/pin", { body: pinned ? { name, pinned: false } : { ...asked, name } });
    say(`${tame(name)} is ${pinned ? "unpinned" : "pinned"}`);
    drawPins();
    drawSessions();
  }, { "data-act": `pin ${name}`, "aria-label": `${pinned ? "Unpin" : "Pin"} ${tame(name)}`, failed });
}

/** The words that its session began with, where they are still known. */
function pinName(name) {
  const known = sessions.find((session) => session.named && session.name === name)?.requests.at(-1).opening;
  return known ? `${tame(known)} · ${tame(name, 40)}` : tame(name);
}

function pinList() {
  if (!pins) {
    els.pins.replaceChildren(h("p", { class: "hint" }, "There is no SSD cache."));
    return;
  }
  els.pins.replaceChildren(pins.pins.length
    ? h("ul", { class: "pins" }, ...pins.pins.map((pin) => h("li", {}, h("b", {}, h("bdi", {}, pinName(pin.name))), ` ${pin.model}, ${counted(pin.files, "file")}, ${bytes(pin.bytes)}, ${ago(pin.at)} `, pinButton(pin.name, {}))))
    : h("p", { class: "hint" }, `Nothing is. Up to ${bytes(pins.most_bytes)} may be.`));
}

// ------------------------------------------------------------------- why

const CAUSES = {
  differs: ({ stored_used }) => `Another text is stored there (last used ${ago(stored_used)}).`,
  other_image: ({ stored_used }) => `Another image is stored there (last used ${ago(stored_used)}).`,
  never_stored: () => "Never stored, or removed longer ago than a daemon remembers; nothing else is there.",
  other_namespace: ({ elsewhere }) => elsewhere?.length && elsewhere.every((other) => other.adapter && !other.differs?.length)
    ? `It is stored, but for ${[...new Set(elsewhere.map((other) => other.adapter))].join(", ")}; adapters share no KV with the model or each other.`
    : "It is stored, but as made with another model file or setting.",
  no_checkpoint: ({ chain_tokens, hot_tokens, cold_tokens }) => `The blocks reach token ${number(chain_tokens)}, but the model's state can be restored only at a checkpoint; the last one stands at token ${number(hot_tokens + cold_tokens)}.`,
  evicted: ({ gone_at }) => `It was stored, and evicted ${ago(gone_at)}.`,
  cleared: ({ gone_at }) => `It was stored, and cleared ${ago(gone_at)}.`,
  damaged: ({ gone_at }) => `Its file was damaged, and removed ${ago(gone_at)}.`,
  reuse_off: ({ reason }) => `Prefixes are not reused: ${reason}`,
  none: ({ prompt_tokens, block_size }) => prompt_tokens <= block_size
    ? `Nothing missed: the prompt is no longer than one block of ${block_size} tokens.`
    : "Nothing missed: every full block before the prompt's last token is there.",
};

async function why(request) {
  const { explanation, model, reached, recomputed } = await json("/omlxd/why-miss", { body: { request_id: request.id } });
  const told = { prompt_tokens: 0, block_size: 0, hot_tokens: 0, cold_tokens: 0, chain_tokens: 0, position: 0, ...explanation };
  const restored = reached >= 0 ? `${number(reached)} tokens were restored` : `${number(told.hot_tokens + told.cold_tokens)} tokens would be restored now`;
  const computed = recomputed ? `, ${number(recomputed)} more lay on SSD and were computed as that was faster or a file damaged` : "";
  const sides = [["This prompt", told.given ?? "", told.stored], ["What is stored", told.stored ?? "", told.given]].filter(([, text]) => text);
  put(els.why,
    h("div", { class: "row" }, h("h3", { id: "why-title" }, "Why it missed"), h("span", { class: "gap" }), button("Close", () => { els.why.hidden = true; }, { class: "quiet" })),
    h("p", {}, `${model}: prompt of ${counted(told.prompt_tokens, "token")}, blocks of ${told.block_size}. ${restored}${computed}.`),
    h("p", {}, h("b", {}, ["none", "reuse_off", "no_checkpoint"].includes(told.cause) ? "" : `First miss at token ${number(told.position)}. `), (CAUSES[told.cause] ?? (() => told.cause))(told)),
    told.elsewhere?.length ? h("ul", {}, ...told.elsewhere.map((other) => h("li", {}, `Namespace ${other.name.slice(0, 8)} holds ${number(other.tokens)} tokens of it${other.adapter ? `, for ${other.adapter}` : ""}${other.differs?.length ? `; it differs in ${other.differs.join(", ")}` : ""}.`))) : null,
    sides.length ? h("div", { class: "sides" }, ...sides.map(([name, text, other]) => h("figure", {}, h("figcaption", {}, name), beside(told.before ?? "", text, other)))) : null);
  els.why.hidden = false;
  els.why.focus();
}

/** Text before the miss, then `text`, marked from where it differs from `other`. */
function beside(before, text, other) {
  let same = 0;
  while (other && same < text.length && text[same] === other[same]) same += 1;
  return h("pre", { tabindex: 0 }, h("span", { class: "soft" }, `…${before}${text.slice(0, same)}`), h("mark", {}, text.slice(same)), "…");
}

// ------------------------------------------------------------------- the tree

async function loadTree() {
  const began = performance.now();
  for (let tries = 1; ; tries += 1) {
    els.sums.textContent = "Reading the files' heads…";
    try {
      ({ trees } = await json("/omlxd/cache/tree"));
      break;
    } catch (error) {
      els.sums.textContent = error.status === 503 ? error.message : "";
      if (error.status !== 503) throw error;
      if (error.code !== "overloaded" || tries === MOST_TRIES) {
        els.tree.element.hidden = true;
        return;
      }
    }
    els.sums.textContent = "Somebody else has the files' heads read; this look waits…";
    await new Promise((resolve) => { setTimeout(resolve, WAIT_MS); });
  }
  const nodes = trees.flatMap((tree) => made(tree)).map((node, index, all) => Object.assign(node, { index }));
  linked(nodes);
  els.tree.show(nodes);
  const sum = (name) => nodes.reduce((all, node) => all + (node.depth ? node[name] : 0), 0);
  els.sums.textContent = `${counted(sum("blocks"), "block")} in ${counted(nodes.length - trees.length, "run")}, ${bytes(sum("bytes"))}; read in ${((performance.now() - began) / 1000).toFixed(1)} s.`;
  els.tree.element.hidden = !nodes.length;
}

/** A tree's model as the root of its nodes. */
function made(tree) {
  const root = { depth: 0, id: "", blocks: 0, bytes: tree.other_bytes, used: 0, text: tree.model || tree.namespace, tree, open: true };
  return [root, ...tree.nodes.map(([depth, id, blocks, size, used, text]) => ({ depth: depth + 1, id, blocks, bytes: size, used, text, tree, open: depth < 1 }))];
}

/** Give each node its end, what is above it, its place beside others, and the sums of all below it. */
function linked(nodes) {
  const above = [];
  const counts = [];
  const finish = (end) => {
    const node = above.pop();
    node.end = end;
    const inner = counts.pop();
    for (const child of inner) child.beside = inner.length;
    if (node.above) {
      node.above.allBlocks += node.allBlocks;
      node.above.allBytes += node.allBytes;
      node.above.newest = Math.max(node.above.newest, node.newest);
    }
  };
  const roots = [];
  for (const node of nodes) {
    while (above.length && above.at(-1).depth >= node.depth) finish(node.index);
    node.above = above.at(-1) ?? null;
    Object.assign(node, { allBlocks: node.blocks, allBytes: node.bytes, newest: node.used });
    const beside = counts.at(-1) ?? roots;
    beside.push(node);
    node.place = beside.length;
    above.push(node);
    counts.push([]);
  }
  while (above.length) finish(nodes.length);
  for (const root of roots) root.beside = roots.length;
}

const tokens = (node, blocks) => number(blocks * node.tree.block_size);

const cells = (node) => [
  h("span", { class: "tree-text" }, node.depth ? node.text.replaceAll("\n", "⏎") || `block ${node.id.slice(0, 12)}` : h("b", {}, node.text)),
  h("span", { class: "tree-size" }, `${tokens(node, node.allBlocks)} tokens`),
  h("span", { class: "tree-size" }, bytes(node.allBytes)),
  h("span", { class: "tree-size" }, ago(node.newest)),
];

function chosen(node) {
  const what = node.depth ? "this prefix and all that goes on from it" : `all of ${node.text}`;
  put(els.node,
    h("p", {}, node.depth
      ? `${tokens(node, node.blocks)} tokens in ${counted(node.blocks, "block")}, ${bytes(node.bytes)}, last used ${ago(node.used)}. With all that goes on from it: ${tokens(node, node.allBlocks)} tokens, ${bytes(node.allBytes)}.`
      : `${node.tree.model || "An unknown model"}, namespace ${node.tree.namespace.slice(0, 8)}: ${tokens(node, node.allBlocks)} tokens, ${bytes(node.allBytes)}, of these ${counted(node.tree.other_files, "record")} of answers.`),
    node.text && node.depth ? h("pre", { tabindex: 0 }, node.text) : null,
    h("p", { class: "row" }, confirmed(`Clear ${what}`, () => `Remove ${bytes(node.allBytes)} from SSD${pins?.pins.length ? ", but for what is pinned" : ""}`, () => clear(node))));
}

/** A button that asks once more before it acts. */
function confirmed(label, sure, act) {
  const box = h("span", { class: "row" });
  const first = button(label, () => {
    const yes = button(sure(), act, { class: "danger", failed });
    box.replaceChildren(yes, button("Keep it", () => { box.replaceChildren(first); first.focus(); }));
    yes.focus();
  });
  box.append(first);
  return box;
}

async function clear(node) {
  const done = await json("/omlxd/cache/clear", { body: { namespace: node.tree.namespace, id: node.id } });
  await load();
  const text = `Gone from SSD: ${counted(done.files, "file")}, ${bytes(done.bytes)}. What RAM holds stays until the model is unloaded.`;
  const stays = done.pinned && `Left alone: ${counted(done.pinned, "pinned file")}; unpin ${done.pins.map(pinName).join(", ")} to clear the rest.`;
  put(els.node, h("p", {}, text), stays ? h("p", { class: "problem" }, stays) : null, ...done.troubles.map((trouble) => h("p", { class: "problem" }, trouble)));
  els.tree.element.focus();
}

/** Show where a request's prompt lies: its last file that begins a run. */
async function find(request) {
  const { files } = await json("/omlxd/cache/files", { body: { request_id: request.id } });
  const names = files.map((file) => file.split("/").at(-1).slice(0, 20));
  const deepest = els.tree.nodes.filter((each) => each.depth && names.includes(each.id)).at(-1);
  if (!deepest) {
    failed(new Error("Nothing of this prompt is on SSD (yet)."));
    return;
  }
  els.tree.reveal(deepest);
  els.tree.element.focus();
}
