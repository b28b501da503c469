// What is kept: the last conversations and their requests, the texts on SSD, why a prompt was computed, pins.

import { ago, button, bytes, counted, h, number, put, redraw, say, tame } from "./dom.js";
import { json } from "./net.js";
import { VirtualTree } from "./virtual.js";

const WAIT_S = 20;
const AGAIN_MS = 3000;

let els = {};
let shownLook = 0; // Which read of the daemon's is shown.
let turn = 0; // Of the looks at the tree; the newest goes on.
let sessions = [];
const looked = new Set(); // Ids of requests whose files are in `owners`.
const owners = new Map(); // Of the first block of a row: the clients of requests that are restored from it.
let pins = null;
let loading = null;
let again = 0;
let left = false; // Another view is shown.

export function start(section) {
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  els.hint = h("p", { class: "hint" });
  els.sessions = h("div", { class: "sessions" });
  els.why = h("section", { class: "why", "aria-labelledby": "why-title", tabindex: -1, hidden: true });
  els.pins = h("div", {});
  els.sums = h("p", { class: "hint", role: "status" }, "Reading the folder…");
  els.tree = new VirtualTree("Kept on SSD", { cells, chosen });
  els.tree.element.hidden = true; // Until there is something in it.
  els.node = h("div", { class: "node", "aria-live": "polite" }, h("p", { class: "hint" }, "Choose a row to read it, or to remove it."));
  section.append(
    h("div", { class: "row" }, h("h2", {}, "Last conversations"), h("span", { class: "gap" }), button("Look again", load, { failed })),
    els.problem,
    els.hint, els.sessions, els.why,
    h("h2", {}, "Kept on SSD"),
    h("p", { class: "hint" }, "Prompts that were computed, and are read from SSD when they come again. Conversations that begin alike share their beginning, and stand below it."),
    els.sums, els.tree.element, els.node,
    h("h2", {}, "Pinned"), h("p", { class: "hint" }, "What is pinned is the last to be removed when room is needed."), els.pins);
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
  const logged = requests.some((request) => request.logged);
  els.hint.textContent = `From the last 64 requests. Their texts are in the daemon's memory alone.${logged ? " Older ones are from the log of cache misses, which holds no texts." : ""}`;
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
    const key = request.session || JSON.stringify([name, request.client, request.opening]); // Two clients are two.
    if (!found.has(key)) found.set(key, { key, name, session: request.session, named: Boolean(request.session) && !request.logged, requests: [] });
    found.get(key).requests.push(request);
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
    const part = prompt ? `, ${Math.round((100 * cached) / prompt)}% of its prompts from the cache` : "";
    const { client, turns, began } = session.requests[0];
    const opening = tame(firstWords(session), 60);
    const shownName = session.session ? shortId(session.session) : session.name;
    return h("details", { "data-name": session.key, open: open.size ? open.has(session.key) : at === 0 },
      h("summary", {}, chip(client), h("b", {}, h("bdi", {}, opening || shownName)),
        h("span", { class: "hint" }, ` ${counted(turns, "turn")}, ${counted(session.requests.length, "request")}, ${ago(began)}${part}`, opening ? [" · ", h("bdi", { class: session.session ? "nowrap" : null }, shownName)] : "")),
      session.session ? h("p", { class: "hint" }, "Session ", h("code", { class: "name" }, h("bdi", {}, tame(session.session, 200)))) : null,
      session.named ? pinButton(session.name, { session: session.name }) : null,
      h("div", { class: "wide folds", tabindex: 0, role: "region", "aria-label": `Requests of ${opening || shownName}` }, h("table", {},
        h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")))),
        h("tbody", {}, ...session.requests.map(line)))));
  }));
  if (!sessions.length) els.sessions.append(h("p", { class: "empty" }, "No request has been made since the daemon began."));
}

const SHORT = 18;
/** Of a session's name what fits beside its words; the opened row has all of it. */
const shortId = (name) => (name.length > SHORT ? `${tame(name.slice(0, SHORT - 1))}…` : tame(name));

/** Of the oldest request whose words are still known. */
const firstWords = ({ requests }) => requests.findLast((request) => request.opening)?.opening ?? "";

const COLUMNS = ["When", "Prompt", "From cache", "Ended", "Model"];
const OUTCOMES = { ok: "complete", disconnected: "stopped" };
const chip = (client) => (client ? [h("span", { class: "client" }, h("bdi", {}, tame(client, 24))), " "] : null);

function line(request) {
  const known = request.cached_tokens >= 0;
  const acts = h("td", { class: "nowrap" },
    button("Why?", () => why(request), { class: "quiet", "aria-label": `Why was request ${request.id} computed`, failed }),
    request.logged ? null : button("On SSD", () => find(request), { class: "quiet", "aria-label": `Show request ${request.id} on SSD`, failed }));
  const texts = [ago(request.began), known ? number(request.prompt_tokens) : "–", known ? number(request.cached_tokens) : "–", OUTCOMES[request.outcome] ?? request.outcome, request.model];
  return h("tr", {}, ...texts.map((text, at) => h("td", { "data-name": COLUMNS[at] }, text)), acts);
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
  const of = sessions.find((session) => session.named && session.name === name);
  const known = of && firstWords(of);
  return known ? `${tame(known)} · ${shortId(name)}` : tame(name);
}

function pinList() {
  if (!pins) {
    els.pins.replaceChildren(h("p", { class: "hint" }, "There is no SSD cache."));
    return;
  }
  els.pins.replaceChildren(pins.pins.length
    ? h("ul", { class: "pins" }, ...pins.pins.map((pin) => h("li", {}, h("b", {}, h("bdi", {}, pinName(pin.name))), ` ${pin.model}, ${counted(pin.files, "file")}, ${bytes(pin.bytes)}, ${ago(pin.at)} `, pinButton(pin.name, {}))))
    : h("p", { class: "hint" }, `Nothing is pinned. Up to ${bytes(pins.most_bytes)} can be.`));
}

// ------------------------------------------------------------------- why

const CAUSES = {
  differs: ({ stored_used }) => `From there on another text is kept (last used ${ago(stored_used)}).`,
  other_image: ({ stored_used }) => `Another image is kept there (last used ${ago(stored_used)}).`,
  never_stored: () => "It was new: no request that is kept goes on from there. (Or it was removed longer ago than the daemon remembers.)",
  other_namespace: ({ elsewhere }) => elsewhere?.length && elsewhere.every((other) => other.adapter && !other.differs?.length)
    ? `It is kept, but for ${[...new Set(elsewhere.map((other) => other.adapter))].join(", ")}; adapters share nothing with the model or each other.`
    : "It is kept, but was made with another model file or setting.",
  no_checkpoint: ({ chain_tokens, hot_tokens, cold_tokens }) => `The blocks reach token ${number(chain_tokens)}, but the model's state can be restored only at a checkpoint; the last one stands at token ${number(hot_tokens + cold_tokens)}.`,
  evicted: ({ gone_at }) => `It was kept, and removed ${ago(gone_at)} because others needed the room.`,
  cleared: ({ gone_at }) => `It was kept, and its owner removed it ${ago(gone_at)}.`,
  damaged: ({ gone_at }) => `Its file was damaged, and removed ${ago(gone_at)}.`,
  reuse_off: ({ reason }) => `Nothing is kept for this model: ${reason}`,
  none: ({ prompt_tokens, block_size }) => prompt_tokens <= block_size
    ? `Prompts are kept in pieces of ${block_size} tokens, and this one is no longer than one piece: it is computed each time.`
    : `All that can be kept of it came from the cache: whole pieces of ${block_size} tokens. The ${counted((prompt_tokens - 1) % block_size + 1, "token")} after the last whole piece are computed each time.`,
};

const WHOLE = ["none"]; // Nothing was computed that could have been kept.

async function why(request) {
  const { explanation, model, reached, recomputed } = await json("/omlxd/why-miss", { body: { request_id: request.id } });
  const told = { prompt_tokens: 0, block_size: 0, hot_tokens: 0, cold_tokens: 0, chain_tokens: 0, position: 0, ...explanation };
  const restored = reached >= 0 ? `${number(reached)} came from the cache` : `${number(told.hot_tokens + told.cold_tokens)} would come from the cache now`;
  const computed = recomputed ? `, ${number(recomputed)} more lay on SSD and were computed as that was faster or a file damaged` : "";
  const sides = [["This prompt", told.given ?? "", told.stored], ["What is kept", told.stored ?? "", told.given]].filter(([, text]) => text);
  put(els.why,
    h("div", { class: "row" }, h("h3", { id: "why-title" }, WHOLE.includes(told.cause) ? "What came from the cache" : "Why it was computed"), h("span", { class: "gap" }), button("Close", () => { els.why.hidden = true; }, { class: "quiet" })),
    h("p", {}, `${model}: of ${counted(told.prompt_tokens, "token")} of the prompt ${restored}${computed}.`),
    h("p", {}, h("b", {}, ["none", "reuse_off", "no_checkpoint"].includes(told.cause) ? "" : `Computed from token ${number(told.position)} on. `), (CAUSES[told.cause] ?? (() => told.cause))(told)),
    told.elsewhere?.length ? h("ul", {}, ...told.elsewhere.map((other) => h("li", {}, `Folder ${other.name.slice(0, 8)} of the cache holds ${number(other.tokens)} tokens of it${other.adapter ? `, for ${other.adapter}` : ""}${other.differs?.length ? `; it differs in ${other.differs.join(", ")}` : ""}.`))) : null,
    sides.length ? h("div", { class: "sides" }, ...sides.map(([name, text, other]) => h("figure", {}, h("figcaption", {}, name), beside(told.before ?? "", text, other)))) : null);
  els.why.hidden = false;
  els.why.focus();
}

/** Text before the place, then `text`, marked from where it differs from `other`. */
function beside(before, text, other) {
  let same = 0;
  while (other && same < text.length && text[same] === other[same]) same += 1;
  return h("pre", { tabindex: 0 }, h("span", { class: "soft" }, `…${before}${text.slice(0, same)}`), h("mark", {}, text.slice(same)), "…");
}

// ------------------------------------------------------------------- the tree

/** The pieces of the daemon's last read; where a newer one is under way, its pieces once they are there. */
async function loadTree(wait = 0, mine = (turn += 1)) {
  let first;
  try {
    first = await json(`/omlxd/cache/tree${wait ? `?wait=${wait}` : ""}`);
  } catch (error) {
    if (error.status !== 503) throw error;
    els.sums.textContent = error.message;
    els.tree.element.hidden = true;
    return;
  }
  if (mine !== turn) return;
  const reading = first.state === "new" ? "" : first.state === "old" ? ` As of ${ago(first.at)}; it is read anew…` : "";
  if (first.look && (first.look !== shownLook || !els.tree.nodes.length)) await showPieces(first);
  askOwners().catch(() => {}); // A row without a client's name is no trouble.
  const kept = first.files ? `: ${counted(first.files, "file")}, ${bytes(first.bytes)}` : "";
  els.sums.textContent = first.look ? `${summed(first)}${reading}` : `Reading the folder${kept}…`;
  if (first.state !== "new" && !left) loadTree(WAIT_S, mine).catch(failed);
}

async function showPieces(first) {
  const parts = new Map();
  const take = (piece) => {
    for (const tree of piece.trees) {
      const known = parts.get(tree.namespace);
      if (known) known.nodes.push(...tree.nodes);
      else parts.set(tree.namespace, tree);
    }
  };
  const draw = () => {
    const nodes = [...parts.values()].flatMap((tree) => made(tree)).map((node, index) => Object.assign(node, { index }));
    linked(nodes);
    els.tree.show(nodes);
    els.tree.element.hidden = !nodes.length;
  };
  take(first);
  draw();
  shownLook = first.look;
  for (let at = 1; at < first.pieces; at += 1) {
    const piece = await json(`/omlxd/cache/tree?piece=${at}`);
    if (piece.look !== first.look) {
      shownLook = 0; // A newer read has taken its place.
      return;
    }
    take(piece);
  }
  if (first.pieces > 1) draw();
}

function summed(first) {
  const { nodes } = els.tree;
  const sum = (name) => nodes.reduce((all, node) => all + (node.depth ? node[name] : 0), 0);
  const rows = nodes.filter((node) => node.depth).length;
  const hidden = first.left_out ? `; ${number(first.left_out)} more, used longest ago, are not shown` : "";
  return `${counted(sum("blocks"), "block")} in ${counted(rows, "row")}, ${bytes(sum("bytes"))}${hidden}.`;
}

/** A tree's model as the root of its nodes. */
function made(tree) {
  const root = { depth: 0, id: "", blocks: 0, bytes: tree.other_bytes, used: 0, text: tree.model || tree.namespace, tree, open: true };
  return [root, ...tree.nodes.map(([depth, id, blocks, size, used, text, client = "", said = "", turns = 0]) => ({ depth: depth + 1, id, blocks, bytes: size, used, text, client, said, turns, tree, open: depth < 1 }))];
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

/** Ask which files the last requests are restored from; a model that is not loaded is not loaded for it. */
async function askOwners() {
  if (!els.tree.nodes.some((node) => node.said && !node.client)) return;
  const { models } = await json("/omlxd/status");
  const ready = models.filter((model) => model.state === "ready").map((model) => model.id);
  const newest = sessions.flatMap(({ session, requests }) => (session ? requests.slice(0, 1) : requests));
  const wanted = newest.filter((request) => !request.logged && ready.includes(request.model) && !looked.has(request.id));
  for (const request of wanted) {
    if (left) return;
    const { files } = await json("/omlxd/cache/files", { body: { request_id: request.id } });
    if (files.length) looked.add(request.id);
    for (const id of files.map(blockOf)) owners.set(id, (owners.get(id) ?? new Set()).add(request.client));
  }
  if (wanted.length) els.tree.draw();
}

const blockOf = (file) => file.split("/").at(-1).slice(0, 20);

/** The client of a row, by its tokens or else by the requests that are restored from it; "": several, or unknown. */
function whose(node) {
  if (node.client || !node.said) return node.client;
  const [client = "", ...others] = owners.get(node.id) ?? [];
  const below = els.tree.nodes.slice(node.index + 1, node.end);
  const same = below.every((each) => owners.get(each.id)?.size === 1 && owners.get(each.id).has(client));
  return others.length || !same ? "" : client;
}

const title = (node) => {
  if (!node.depth) return h("b", {}, node.text);
  const goesOn = node.text && node.said === node.above?.said; // Its beginning stands above it: what differs is told.
  if (node.said && !goesOn) return h("bdi", {}, tame(node.said, 90));
  return h("span", { class: "raw" }, node.text.replaceAll("\n", "⏎") || `block ${node.id.slice(0, 12)}`);
};

const cells = (node) => [
  h("span", { class: "tree-text" }, node.depth ? chip(whose(node)) : null, title(node)),
  h("span", { class: "tree-size turns" }, node.turns ? counted(node.turns, "turn") : ""),
  h("span", { class: "tree-size" }, `${tokens(node, node.allBlocks)} tokens`),
  h("span", { class: "tree-size" }, bytes(node.allBytes)),
  h("span", { class: "tree-size" }, ago(node.newest)),
];

function chosen(node) {
  const what = node.depth ? "this and all that goes on from it" : `all of ${node.text}`;
  put(els.node,
    node.said ? h("p", {}, chip(whose(node)), h("b", {}, h("bdi", {}, node.said)), ` ${counted(node.turns, "turn")}`) : null,
    h("p", {}, node.depth
      ? `${tokens(node, node.blocks)} tokens in ${counted(node.blocks, "block")}, ${bytes(node.bytes)}, last used ${ago(node.used)}.`.concat(node.allBlocks > node.blocks ? ` With all that goes on from it: ${tokens(node, node.allBlocks)} tokens, ${bytes(node.allBytes)}.` : "")
      : `${node.tree.model || "An unknown model"}, folder ${node.tree.namespace.slice(0, 8)}: ${tokens(node, node.allBlocks)} tokens, ${bytes(node.allBytes)}, of these ${counted(node.tree.other_files, "record")} of answers.`),
    node.text && node.depth ? h("pre", { tabindex: 0 }, node.text) : null,
    h("p", { class: "row" }, confirmed(`Remove ${what}`, () => `Yes, remove ${bytes(node.allBytes)} from SSD${pins?.pins.length ? ", but for what is pinned" : ""}`, () => clear(node))));
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
  await loadTree(WAIT_S);
  const text = `Gone from SSD: ${counted(done.files, "file")}, ${bytes(done.bytes)}. What RAM holds stays until the model is unloaded.`;
  const stays = done.pinned && `Left alone: ${counted(done.pinned, "pinned file")}; unpin ${done.pins.map(pinName).join(", ")} to remove the rest.`;
  put(els.node, h("p", {}, text), stays ? h("p", { class: "problem" }, stays) : null, ...done.troubles.map((trouble) => h("p", { class: "problem" }, trouble)));
  els.tree.element.focus();
}

/** Show where a request's prompt lies: its last file that begins a run. */
async function find(request) {
  const { files } = await json("/omlxd/cache/files", { body: { request_id: request.id } });
  const names = files.map(blockOf);
  const deepest = els.tree.nodes.filter((each) => each.depth && names.includes(each.id)).at(-1);
  if (!deepest) {
    failed(new Error("Nothing of this prompt is on SSD, or not yet."));
    return;
  }
  els.tree.reveal(deepest);
  els.tree.element.focus();
}
