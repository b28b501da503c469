// The models of this machine: what is loaded, and orders to load, unload, pin and pull.

import { button, bytes, h, number, put, redraw, s, say, seconds } from "./dom.js";
import { events, json, send } from "./net.js";

const LOOK_MS = 5000;

let els = {};
let timer = 0;
let pulling = null;
let looks = 0;
let lost = false; // What is shown says that the daemon did not answer.

export function start(section) {
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  els.list = h("ul", { class: "cards" });
  els.name = h("input", { id: "pull-name", placeholder: "mlx-community/Qwen3-8B-4bit", spellcheck: "false", autocomplete: "off", required: true });
  els.pull = h("button", { type: "submit", class: "main" }, "Pull");
  els.progress = h("div", { class: "progress", role: "status" });
  const form = h("form", { class: "pull", novalidate: true },
    h("label", { for: "pull-name" }, "A hub id"), h("div", { class: "row" }, els.name, els.pull), els.progress);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (pulling) pulling.abort();
    else if (els.name.value.trim()) pull(els.name.value.trim());
    else {
      put(els.progress, problem("Write the hub id of a model first."));
      els.name.focus();
    }
  });
  section.append(
    h("h2", { class: "unseen" }, "Models"), els.problem, els.list,
    h("h2", {}, "Pull a model"),
    h("p", { class: "hint" }, "The daemon downloads it from the Hugging Face hub. A download that was stopped goes on where it was."), form);
}

export function show() {
  clearInterval(timer);
  timer = setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
  look();
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

function draw(models) {
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
    model.aliases.length && `also ${model.aliases.join(", ")}`, model.source,
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
    h("p", { class: "row" },
      leaving ? act("Keep", "/omlxd/models/load", { model: model.id }, "kept") : loaded ? act("Unload", "/omlxd/models/unload", { model: model.id }, "unloaded") : act("Load", "/omlxd/models/load", { model: model.id }, "loaded"),
      act(model.pinned ? "Unpin" : "Pin", "/omlxd/models/pin", { model: model.id, pinned: !model.pinned }, model.pinned ? "unpinned" : "pinned")));
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
    els.pull.textContent = "Pull";
  }
}
