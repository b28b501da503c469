// The models of this machine: what is loaded, found and fits; orders to load, unload, pin, name, delete and get.

import { copy } from "./copy.js";
import { button, bytes, h, number, put, redraw, s, say, seconds } from "./dom.js";
import { events, json, send } from "./net.js";

const LOOK_MS = 5000;
/** Models that are known to do well, with about the bytes that they need when loaded. */
const OFFERED = [
  ["mlx-community/Qwen3-0.6B-4bit", 0.9e9, "small and quick, for trying out"],
  ["mlx-community/Qwen3-4B-Instruct-2507-4bit", 3.5e9, "good answers on a small machine"],
  ["mlx-community/Qwen3-8B-4bit", 6e9, "thinks, takes tools"],
  ["mlx-community/gpt-oss-20b-MXFP4-Q8", 14e9, "thinks, takes tools, good at code"],
  ["mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 20e9, "for coding agents"],
];

let els = {};
let timer = 0;
let pulling = null;
let looks = 0;
let opened = new Set(); // Whose settings are shown.
const drafts = new Map(); // What is written in the fields of settings, by their labels.
let asked = ""; // Of which model it is asked whether its files go.
let lost = false; // What is shown says that the daemon did not answer.

export function start(section) {
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  els.list = h("ul", { class: "cards" });
  els.name = h("input", { id: "pull-name", placeholder: "mlx-community/Qwen3-8B-4bit", spellcheck: "false", autocomplete: "off", required: true });
  els.pull = h("button", { type: "submit", class: "main" }, "Get");
  els.offered = h("ul", { class: "offered" });
  els.found = h("div", {}, h("p", { class: "hint" }, "Looking…"));
  els.progress = h("div", { class: "progress", role: "status" });
  const form = h("form", { class: "pull", novalidate: true },
    h("label", { for: "pull-name" }, "Its name on the hub"), h("div", { class: "row" }, els.name, els.pull), els.progress);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (pulling) pulling.abort();
    else if (els.name.value.trim()) pull(els.name.value.trim());
    else {
      put(els.progress, problem("Write the name of a model first, as ORG/NAME."));
      els.name.focus();
    }
  });
  section.append(
    h("h2", { class: "unseen" }, "Models"), els.problem, els.list,
    h("h2", {}, "Get a model"),
    h("p", { class: "hint" }, "The daemon downloads it from the Hugging Face hub. A download that was stopped goes on where it was."), form,
    els.offered, h("h2", {}, "Found in other programs"), els.found);
}

export function show() {
  clearInterval(timer);
  timer = setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
  look();
  find();
}

export function hide() {
  clearInterval(timer);
}

function failed(error) {
  lost = error.status === 0;
  els.problem.textContent = error.message;
  els.problem.hidden = false;
}

async function look() {
  const mine = (looks += 1);
  try {
    const { models } = await json("/omlxd/models");
    if (lost) els.problem.hidden = true;
    lost = false;
    if (mine === looks) draw(models);
  } catch (error) {
    if (error.status === 401) hide();
    failed(error);
  }
}

/** What other programs have here, and which of the offered models fit. */
async function find() {
  try {
    const { models, room_bytes: room } = await json("/omlxd/models/found");
    put(els.offered, ...OFFERED.map(([name, needs, why]) => h("li", { class: "row" },
      h("span", {}, h("b", { class: "name" }, name), h("span", { class: "hint" }, ` ${why}; needs about ${bytes(needs)}`)),
      needs <= room ? button("Get", () => { els.name.value = name; return pulling ? null : pull(name); }, { class: "quiet", "aria-label": `Get ${name}` }) : h("span", { class: "state failed" }, `too large for ${bytes(room)}`))));
    put(els.found, models.length
      ? h("ul", { class: "cards" }, ...models.map((model) => h("li", {},
        h("b", { class: "name" }, model.name),
        h("p", { class: "hint" }, [STORES[model.store] ?? model.store, model.type, model.disk_bytes && `${bytes(model.disk_bytes)} on disk`, fits(model, room)].filter(Boolean).join(" · ")),
        model.trouble ? h("p", { class: "problem mild" }, model.trouble) : null,
        model.command ? h("div", { class: "copyable" }, h("code", {}, model.command), copy("Copy", () => model.command, `Copy the command that imports ${model.name}`)) : null)))
      : h("p", { class: "hint" }, "Ollama, LM Studio and llama.cpp have none here."));
  } catch (error) {
    put(els.found, h("p", { class: "hint" }, error.message));
  }
}

const SOURCES = { hub: "from the hub", folder: "from a folder", "model-dir": "from the model folder", demo: "built in, for trying out" };
const STORES = { ollama: "Ollama", lmstudio: "LM Studio", "llama.cpp": "llama.cpp" };
const fits = (model, room) => model.disk_bytes && (1.15 * model.disk_bytes <= room ? "fits" : `too large for ${bytes(room)}`);

function draw(models) {
  if (els.list.querySelector(".settings:focus-within")) return; // Somebody writes.
  const open = new Set([...els.list.querySelectorAll("details[open]")].map((each) => each.dataset.id));
  opened = open;
  redraw(els.list, () => put(els.list, ...models.map(card)));
  if (!models.length) put(els.list, h("li", { class: "empty" }, "No model is on this machine yet."));
}

function card(model) {
  const facts = [
    model.disk_bytes && `${bytes(model.disk_bytes)} on disk`,
    model.memory_bytes ? `its process holds ${bytes(model.memory_bytes)}` : model.load_bytes && `needs about ${bytes(model.load_bytes)}`,
    model.context_length && `context ${number(model.context_length)}`,
    model.images && "reads images", model.tools && "takes tools", model.in_flight && `${model.in_flight} in flight`,
    model.state === "ready" && !model.pinned && model.expires_in_s !== null && `goes in ${seconds(model.expires_in_s)}`,
    model.aliases.length && `also ${model.aliases.join(", ")}`, SOURCES[model.source],
  ].filter(Boolean);
  const loaded = ["ready", "loading", "restarting", "unloading"].includes(model.state);
  const leaving = model.leaving && loaded;
  const act = (verb, path, body, done) => button(verb, async (pressed) => {
    els.problem.hidden = true;
    pressed.textContent = `${verb}…`;
    try {
      const answer = await json(path, { body });
      say(`${model.id}: ${answer.gone === false ? "unloads after what it answers" : done}`);
    } finally {
      await look();
    }
  }, { failed, "data-act": `${verb.replace(/^Un/, "").toLowerCase()} ${model.id}`, "aria-label": `${verb} ${model.id}` });
  return h("li", {},
    h("div", { class: "row" }, h("b", { class: "name" }, model.id),
      h("span", { class: `state ${model.state}` }, leaving ? "unloads after what it answers" : model.state),
      model.default ? h("span", { class: "state" }, "default") : null, model.pinned ? h("span", { class: "state" }, "pinned") : null),
    h("p", { class: "hint" }, facts.join(" · ")),
    model.trouble ? h("p", { class: "problem" }, model.trouble) : null,
    model.never ? h("p", { class: "problem" }, model.never) : null,
    h("p", { class: "row" },
      leaving ? act("Keep", "/omlxd/models/load", { model: model.id }, "kept") : loaded ? act("Unload", "/omlxd/models/unload", { model: model.id }, "unloaded") : act("Load", "/omlxd/models/load", { model: model.id }, "loaded"),
      act(model.pinned ? "Unpin" : "Pin", "/omlxd/models/pin", { model: model.id, pinned: !model.pinned }, model.pinned ? "unpinned" : "pinned"),
      removal(model)),
    settings(model));
}

/** Asks once more before the files go. The question outlives the list's being drawn anew. */
function removal(model) {
  const box = h("span", { class: "row" });
  const keep = () => { asked = ""; box.replaceChildren(first); };
  const first = button("Delete", () => { ask(); yes.focus(); }, { class: "quiet", "aria-label": `Delete ${model.id}` });
  const yes = button(`Yes, delete ${model.disk_bytes ? bytes(model.disk_bytes) : "it"}`, async () => {
    const { folder } = await json("/omlxd/models/remove", { body: { model: model.id } });
    asked = "";
    say(`${model.id} is deleted: ${folder}`);
    await look();
  }, { class: "danger", "data-act": `delete ${model.id}`, failed: (error) => { failed(error); keep(); } });
  const ask = () => {
    asked = model.id;
    box.replaceChildren(yes, button("Keep it", () => { keep(); first.focus(); }, { "data-act": `keep ${model.id}` }));
  };
  if (asked === model.id) ask();
  else box.append(first);
  return box;
}

/** A field whose text outlives the list's being drawn anew. */
function field(label, placeholder, told = () => {}) {
  const input = h("input", { type: "text", placeholder, "aria-label": label, spellcheck: "false", autocomplete: "off", value: drafts.get(label) ?? "" });
  input.addEventListener("input", () => {
    drafts.set(label, input.value);
    told();
  });
  return input;
}

/** Another name, how long it stays; and where all else is set. */
function settings(model) {
  const name = field(`Another name for ${model.id}`, "another name, as gpt-4o");
  const stay = field(`How long ${model.id} stays loaded`, "30m, 2h, or -1 for good");
  const order = (path, body, done) => async () => {
    els.problem.hidden = true;
    await json(path, { body: body() });
    for (const each of [name, stay]) {
      each.value = "";
      each.dispatchEvent(new Event("input"));
    }
    document.activeElement.blur();
    say(done);
    await look();
  };
  return h("details", { class: "settings", "data-id": model.id, open: opened.has(model.id) }, h("summary", {}, "Settings"),
    h("div", { class: "row" }, name, button("Add this name", order("/omlxd/models/alias", () => ({ alias: name.value.trim(), model: model.id }), "named"), { failed })),
    ...model.aliases.map((alias) => h("p", { class: "row" }, h("span", {}, `also called ${alias}`), button("Take it away", order("/omlxd/models/alias", () => ({ alias, model: null }), "taken away"), { class: "quiet", failed }))),
    h("div", { class: "row" }, stay, button("Load for this long", order("/omlxd/models/load", () => ({ model: model.id, keep_alive: stay.value.trim() }), "loaded"), { failed })),
    ...inFile(model),
    model.folder ? h("p", { class: "hint" }, `Its files: ${model.folder}`) : null);
}

const FIELDS = [["temperature", "0.7"], ["context-limit", "32768"], ["max-tokens", "4096"], ["ttl", "2h"]];
const quoted = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** What the file of settings says of a model, and the command that sets more of it: the page writes no files. */
function inFile(model) {
  const said = model.settings.map(({ name, value, source }) => h("tr", {}, h("td", {}, h("code", {}, `${name} = ${value}`)), h("td", { class: "hint" }, source.replace(`${model.config} `, "").replace(` (${name})`, ""))));
  const code = h("code", {});
  const inputs = FIELDS.map(([name, example]) => [name, field(`${name} of ${model.id}`, `${name}, as ${example}`, () => tell())]);
  const command = () => {
    const lines = inputs.filter(([, input]) => input.value.trim()).map(([name, { value }]) => `${name} = ${/^[\d.]+$/.test(value.trim()) ? value.trim() : JSON.stringify(value.trim())}`);
    if (!lines.length) return "";
    // A second table of the same name would be an error.
    if (model.table) return [`\${EDITOR:-nano} ${quoted(model.config)}`, `# under [models.${JSON.stringify(model.table)}]:`, ...lines.map((line) => `# ${line}`)].join("\n");
    return [`cat >> ${quoted(model.config)} <<'END'`, `[models.${JSON.stringify(model.id)}]`, ...lines, "END"].join("\n");
  };
  const box = h("div", { class: "copyable", hidden: true }, h("pre", {}, code), copy("Copy", command, `Copy the command that sets ${model.id}`));
  const tell = () => {
    code.textContent = command();
    box.hidden = !code.textContent;
  };
  tell();
  return [
    said.length ? h("table", { class: "said" }, h("tbody", {}, ...said)) : h("p", { class: "hint" }, "The file of settings says nothing of this model."),
    h("p", { class: "hint" }, "Settings are lines of ", h("code", {}, model.config), ". Write what you want here, and run the command in a terminal; then restart the daemon, or send it SIGHUP."),
    h("div", { class: "row" }, ...inputs.map(([, input]) => input)), box,
  ];
}

const problem = (sentence) => h("p", { class: "problem", role: "alert" }, sentence);

async function pull(model) {
  const mine = (pulling = new AbortController());
  els.pull.textContent = "Stop";
  const bar = s("rect", { x: 0, width: 0, height: 10, class: "ram" });
  const told = h("p", { class: "hint" }, "Asking the hub…");
  put(els.progress, s("svg", { class: "source", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, bar), told);
  try {
    const answer = await send("/omlxd/models/pull", { body: { model }, signal: mine.signal });
    let ended = false;
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      if (event.folder) {
        ended = true;
        bar.setAttribute("width", 1000);
        told.textContent = `${event.id} is here: ${event.folder}`;
        await look();
      } else if (event.total) {
        bar.setAttribute("width", (1000 * event.done) / event.total);
        told.textContent = `${bytes(event.done)} of ${bytes(event.total)}`;
      } else told.textContent = "Downloading…";
    }
    if (!ended) throw new Error("The daemon ended the download.");
  } catch (error) {
    put(els.progress, error.name === "AbortError" ? h("p", { class: "hint" }, "Stopped. What is here is kept.") : problem(error.message));
  } finally {
    pulling = null;
    els.pull.textContent = "Get";
  }
}
