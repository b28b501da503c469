// A conversation with a model. It lives in this browser and goes nowhere but to this daemon.

import { Answer } from "./answer.js";
import { Chats } from "./chats.js";
import { copy } from "./copy.js";
import { button, h, number, say, tame } from "./dom.js";
import { Images } from "./images.js";
import { fresh, isMessage, keep, kept } from "./keep.js";
import { Plain, code } from "./markdown.js";
import { Refused, events, json, send } from "./net.js";
import { body, take } from "./request.js";

const PAGE = 60;
const NEAR = 80;

let chat = fresh();
let models = [];
let running = null; // {abort, message}
let following = true; // The view stays at the end, whatever grows.
let top = 0;
let shown = PAGE; // messages, from the end
let images = null;
let before = null; // The conversation that "New chat" put away.
let chats = null; // The list of kept ones.
let els = {};

export function start(section) {
  chat = { ...chat, ...kept() };
  chats = new Chats({
    opened: (other) => { if (other.session !== chat.session) begin({ ...fresh(), ...other, messages: other.messages.filter(isMessage) }, "Opened"); closeList(); },
    longer: (other) => {
      if (running || other.session !== chat.session || other.messages.length <= chat.messages.length) return;
      begin({ ...chat, messages: other.messages.filter(isMessage) }, "");
    },
    gone: (ids) => { if (ids.includes(chat.session)) begin({ ...fresh(), options: chat.options }, "Deleted"); },
    begin: clear,
  });
  els.model = h("select", { id: "chat-model", onchange: modelChanged });
  els.sees = h("span", { class: "hint" });
  els.log = h("div", { class: "log", role: "log", "aria-label": "Conversation" });
  els.earlier = h("button", { type: "button", class: "quiet earlier", onclick: showEarlier }, "Show earlier messages");
  els.scroll = h("div", { class: "scroll", tabindex: -1, onscroll: scrolled }, els.earlier, els.log);
  els.end = h("button", { type: "button", class: "newest", hidden: true, onclick: toEnd }, "↓ Newest");
  new ResizeObserver(() => { if (following) toEnd(); else scrolled(); }).observe(els.log);
  new ResizeObserver(() => { if (following) toEnd(); }).observe(els.scroll);
  els.text = h("textarea", {
    id: "chat-text", rows: 1, dir: "auto", value: chat.draft ?? "", placeholder: "Ask something", enterkeyhint: "send",
    "aria-describedby": "chat-keys", onkeydown: typed, oninput: grow, onpaste: pasted,
  });
  els.file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, hidden: true, onchange: chosen });
  els.attach = h("button", { type: "button", class: "quiet", "aria-label": "Add images", title: "Add images", hidden: true, onclick: () => els.file.click() }, "+ Image");
  els.send = h("button", { type: "button", class: "main", onclick: pressed }, "Send");
  images = new Images(blind, (problem = els.notice.textContent) => { notice(problem); els.text.focus(); });
  els.options = options();
  els.toggle = h("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": "chat-options", onclick: () => {
    els.options.hidden = !els.options.hidden;
    els.toggle.setAttribute("aria-expanded", String(!els.options.hidden));
  } }, "Options");
  els.notice = h("p", { class: "problem", role: "alert", hidden: true });
  els.showList = h("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": "chats", onclick: () => {
    const open = chats.element.classList.toggle("open");
    els.showList.setAttribute("aria-expanded", String(open));
    if (open) chats.search.focus();
  } }, "Chats");
  section.append(
    h("h2", { class: "unseen" }, "Chat"),
    chats.element,
    h("div", { class: "talk" },
      h("div", { class: "bar" },
        els.showList, h("label", { for: "chat-model" }, "Model"), els.model, els.sees,
        h("span", { class: "gap" }),
        els.toggle,
        button("New chat", clear, { class: "quiet" })),
      els.options,
      els.scroll,
      h("div", { class: "composer" },
        els.end, els.notice, images.element,
        h("label", { class: "unseen", for: "chat-text" }, "Message"),
        h("div", { class: "row" }, els.file, els.attach, els.text, els.send),
        h("p", { class: "hint", id: "chat-keys" }, "Enter sends, Shift+Enter makes a new line, Escape stops."))),
  );
  section.addEventListener("dragover", (event) => { event.preventDefault(); section.classList.add("dropping"); });
  section.addEventListener("dragleave", (event) => { if (!section.contains(event.relatedTarget)) section.classList.remove("dropping"); });
  section.addEventListener("drop", (event) => {
    event.preventDefault();
    section.classList.remove("dropping");
    images.add(event.dataTransfer.files);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running && !section.hidden) stop(); });
  addEventListener("pagehide", () => {
    chat.draft = els.text.value;
    if (running) running.message.problem = "Interrupted: the page was left. Regenerate asks again.";
    save();
    chats.flush();
  });
  draw();
  chats.mark(chat.session);
  chats.start();
}

function closeList() {
  chats.element.classList.remove("open");
  els.showList.setAttribute("aria-expanded", "false");
}

export async function show() {
  els.text.focus({ preventScroll: true });
  toEnd();
  await lookAtModels();
}

async function lookAtModels() {
  try {
    const { data } = await json("/v1/models");
    models = data.filter((model) => model.omlxd.kind === "chat");
    const chosen = els.model.value || chat.options.model;
    els.model.replaceChildren(...models.map((model) => h("option", { value: model.id }, model.display_name)));
    if (models.some((model) => model.id === chosen)) els.model.value = chosen;
    modelChanged();
    notice(models.length ? "" : "No model is here yet: the Models view gets one.");
  } catch (error) {
    notice(error.message);
  }
}

// ------------------------------------------------------------------- settings of the conversation

function options() {
  els.fields = {};
  const field = (name, label, made, hint = "") => {
    els.fields[name] = made;
    made.id = `chat-${name}`;
    made.value = chat.options[name] ?? "";
    made.addEventListener("change", () => { chat.options[name] = made.value; save(); });
    return h("p", { class: made.tagName === "TEXTAREA" ? "field broad" : "field" }, h("label", { for: made.id }, label), made, hint && h("span", { class: "hint" }, hint));
  };
  return h("div", { class: "options fields", id: "chat-options", role: "group", "aria-label": "Options", hidden: true },
      field("system", "System prompt", h("textarea", { rows: 2 })),
      field("temperature", "Temperature (0: always the likeliest)", h("input", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "the model's" })),
      field("max_tokens", "Longest answer", h("input", { type: "number", min: 1, step: 1, placeholder: "tokens; no limit" })),
      field("thinking", "Thinking", h("select", {}, h("option", { value: "" }, "the model's default"), h("option", { value: "on" }, "on"), h("option", { value: "off" }, "off"))),
      field("tools", "Tools", h("textarea", { rows: 3, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "weather", "parameters": {…}}}]' }), "JSON, as OpenAI has it. You give a call's result below it."));
}

const model = () => models.find((each) => each.id === els.model.value);
const sees = () => model()?.omlxd.input_modalities.includes("image") ?? false;
const blind = () => (sees() ? "" : `${model()?.display_name ?? "This model"} reads no images: choose a model that does.`);

function modelChanged() {
  chat.options.model = els.model.value;
  const now = model();
  els.sees.textContent = now ? [now.omlxd.context_length ? `${number(now.omlxd.context_length)} tokens` : "", sees() ? "reads images" : "", now.omlxd.state === "ready" ? "" : now.omlxd.state].filter(Boolean).join(", ") : "";
  els.attach.hidden = !sees();
}

function notice(text) {
  els.notice.textContent = text;
  els.notice.hidden = !text;
}

// ------------------------------------------------------------------- keeping it

function save() {
  const fits = keep(chat);
  chats?.later(chat);
  if (!fits && !chats?.keeping) notice("This conversation is too long for the browser to keep: what came last goes with this page.");
}

/** The conversation goes with the key that it was made with. */
export function forget() {
  stop();
  running = before = null;
  chat = fresh();
  if (els.text) els.text.value = "";
  save();
}

function clear() {
  if (chat.messages.length) before = chat;
  begin({ ...fresh(), options: chat.options }, "New chat");
}

function begin(other, said) {
  stop();
  chat = other;
  chats.mark(chat.session);
  for (const [name, field] of Object.entries(els.fields)) field.value = chat.options[name] ?? "";
  if (models.some((each) => each.id === chat.options.model)) els.model.value = chat.options.model;
  shown = PAGE;
  notice("");
  save();
  draw();
  say(said);
  els.text.focus();
}

// ------------------------------------------------------------------- the log

function draw() {
  const from = Math.max(0, chat.messages.length - shown);
  els.earlier.hidden = from === 0;
  els.earlier.textContent = `Show earlier messages (${number(from)})`;
  els.log.replaceChildren(...chat.messages.slice(from).map((message, at) => article(message, from + at)));
  if (!chat.messages.length) els.log.append(h("p", { class: "empty" }, "Ask something. The bar under each answer shows how much of the conversation so far the model had kept, in memory or on SSD, and how much it had to read anew."));
  if (!chat.messages.length && before) els.log.append(h("p", { class: "empty" }, button("Back to the last chat", () => begin(before, "The last chat"), { class: "quiet" })));
  lastButtons();
  toEnd();
}

function showEarlier() {
  const before = els.scroll.scrollHeight - els.scroll.scrollTop;
  const from = Math.max(0, chat.messages.length - shown);
  const to = Math.max(0, from - PAGE);
  shown += PAGE;
  els.log.prepend(...chat.messages.slice(to, from).map((message, at) => article(message, to + at)));
  els.earlier.hidden = to === 0;
  els.earlier.textContent = `Show earlier messages (${number(to)})`;
  following = false;
  els.scroll.scrollTop = els.scroll.scrollHeight - before;
}

const atEnd = () => els.scroll.scrollHeight - els.scroll.scrollTop - els.scroll.clientHeight < NEAR;

function toEnd() {
  following = true;
  els.scroll.scrollTop = els.scroll.scrollHeight;
  els.end.hidden = true;
}

/** What grows below leaves the end behind; only who scrolls up stops following. */
function scrolled() {
  const now = els.scroll.scrollTop;
  if (atEnd()) following = true;
  else if (now < top - 1) following = false;
  top = now;
  els.end.hidden = following;
}

const WHO = { user: "You", assistant: "Model", tool: "Result" };

function article(message, at) {
  const node = h("article", { class: `message ${message.role}`, "data-at": at },
    h("h3", {}, message.role === "assistant" && message.model ? message.model.split("/").at(-1) : WHO[message.role]));
  if (message.role === "assistant") {
    const view = new Answer(message, () => { if (following) toEnd(); });
    node.append(view.element);
    node.view = view;
    view.update();
  } else if (message.role === "tool") {
    node.append(code(message.content, message.name));
  } else {
    if (message.images?.length) node.append(h("ul", { class: "thumbs" }, ...message.images.map((url, index) => h("li", {}, h("img", { src: url, alt: `Image ${index + 1}` })))));
    const said = h("div", { class: "said" });
    new Plain(said).show(message.content);
    node.append(said);
  }
  node.append(h("div", { class: "acts" }));
  return node;
}

/** Edit, which each question has; and what only the last turn has: copy, regenerate, results of calls. */
function lastButtons() {
  for (const acts of els.log.querySelectorAll(".acts")) acts.replaceChildren();
  if (running) return;
  const acts = (at) => els.log.querySelector(`[data-at="${at}"] .acts`);
  const last = chat.messages.length - 1;
  const asked = chat.messages.findLastIndex((message) => message.role === "user");
  for (const node of els.log.querySelectorAll("article.user")) {
    const at = Number(node.dataset.at);
    const label = at === asked ? "Edit your last message" : "Edit this question, and go on from it";
    node.querySelector(".acts").append(button("Edit", () => edit(at), { class: "quiet", "aria-label": label }));
  }
  const answer = chat.messages[last];
  if (answer?.role !== "assistant") {
    if (last >= 0) acts(last)?.append(button("Answer", () => answerNow(), { class: "quiet" }));
    return;
  }
  if (answer.content) acts(last).append(copy("Copy", () => answer.content, "Copy the answer"));
  acts(last).append(button("Regenerate", async () => {
    const [former] = chat.messages.splice(last);
    els.log.lastElementChild?.remove();
    const { messages } = chat;
    await answerNow();
    const made = messages[last];
    if (made?.content || made?.reasoning || made?.calls?.length) return;
    messages[last] = former; // Stopped, or refused, before anything came.
    save();
    draw();
    if (made?.problem) notice(made.problem);
  }, { class: "quiet" }));
  if (answer.calls?.length) acts(last).append(results(answer.calls));
}

function results(calls) {
  const fields = calls.map((call, at) => h("p", { class: "field broad" },
    h("label", { for: `result-${at}` }, `Result of ${call.name}`), h("textarea", { id: `result-${at}`, rows: 2 })));
  const form = h("form", { class: "results" }, ...fields, h("button", { type: "submit" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    calls.forEach((call, at) => add({ role: "tool", name: call.name, id: call.id, content: form.querySelector(`#result-${at}`).value }));
    answerNow();
  });
  return form;
}

function edit(at, draft = chat.messages[at].content) {
  const message = chat.messages[at];
  const node = els.log.querySelector(`[data-at="${at}"]`);
  const text = h("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Your message" });
  text.value = draft;
  const form = h("form", { class: "edit" }, text, h("p", { class: "row end" },
    h("button", { type: "button", onclick: () => { draw(); els.text.focus(); } }, "Cancel"), h("button", { type: "submit", class: "main" }, "Send again")));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape") { draw(); els.text.focus(); }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!text.value.trim() && !message.images?.length) {
      text.focus();
      return;
    }
    const { messages } = chat;
    const whole = { ...chat, session: fresh().session, messages: [...messages] };
    const isLast = messages.findLastIndex((each) => each.role === "user") === at;
    const former = messages.splice(at, Infinity, { ...message, content: text.value.trim() });
    draw();
    els.text.focus();
    const refused = await answerNow();
    if (!refused && !isLast && chats.keeping) await chats.write(whole, `${tame(whole.messages[0].content, 50)} (before an edit)`);
    if (!refused || chat.messages !== messages) return;
    messages.splice(at, Infinity, ...former); // No answer is lost to an edit that the daemon refused.
    save();
    draw();
    edit(at, text.value);
    notice(refused);
  });
  for (const acts of els.log.querySelectorAll(".acts")) acts.replaceChildren();
  node.replaceChildren(form);
  text.focus();
}

function add(message) {
  if (!chat.messages.length) els.log.replaceChildren();
  chat.messages.push(message);
  shown += 1;
  const node = article(message, chat.messages.length - 1);
  els.log.append(node);
  return node;
}

// ------------------------------------------------------------------- asking

function pressed(event) {
  if (!running) sendNow();
  else if (event.detail < 2) stop(); // The second click of a double one was meant for Send.
}

async function sendNow() {
  await images.reading;
  if (running) return;
  const editing = els.log.querySelector(".edit textarea");
  if (editing) {
    notice("An earlier message is being edited: send it again, or cancel.");
    editing.focus();
    return;
  }
  const content = els.text.value.trim();
  if (!content && !images.urls.length) {
    els.text.focus();
    return;
  }
  const message = { role: "user", content, ...(images.urls.length ? { images: images.urls } : {}) };
  try {
    body(els.model.value, [...chat.messages, message], chat.options);
  } catch (error) {
    notice(error.message);
    return;
  }
  add(message);
  images.show([]);
  els.text.value = "";
  grow();
  const refused = await answerNow();
  if (refused && !els.text.value && !images.urls.length && chat.messages.at(-2) === message) takeBack(message, refused);
}

/** A message that the daemon refused goes back into its field: no later prompt carries it. */
function takeBack(message, refused) {
  chat.messages.length -= 2;
  save();
  draw();
  els.text.value = message.content;
  images.show(message.images ?? []);
  grow();
  notice(refused);
  els.text.focus();
}

function stop() {
  running?.abort.abort();
}

const BUSY = "The model answers still: Escape or Stop ends its answer.";
const INTERRUPTED = "Interrupted: the connection to the daemon broke. Regenerate asks again.";

/** Gives the reason if the daemon refused the request, or the options make none. */
async function answerNow() {
  if (running) return "";
  let asked;
  let refused = "";
  notice("");
  try {
    asked = body(els.model.value, chat.messages, chat.options);
  } catch (error) {
    notice(error.message);
    return error.message;
  }
  save();
  const message = { role: "assistant", model: asked.model, content: "", reasoning: "", calls: [] };
  const node = add(message);
  const { view } = node;
  running = { abort: new AbortController(), message };
  node.setAttribute("aria-busy", "true");
  els.send.textContent = "Stop";
  els.send.classList.add("stop");
  lastButtons();
  toEnd();
  say("The model answers.");
  const began = performance.now();
  const waiting = setInterval(() => waits(view, began), 500);
  const saw = { ttft: null, pieces: 0, lasted: 0 };
  try {
    const answer = await send("/v1/chat/completions", { body: asked, signal: running.abort.signal, headers: { "x-session-affinity": chat.session } });
    message.request = answer.headers.get("x-request-id");
    for await (const event of events(answer)) {
      if (take(message, event)) {
        const now = (performance.now() - began) / 1000;
        saw.ttft ??= now;
        saw.lasted = now - saw.ttft;
        saw.pieces += 1;
      }
      view.later();
    }
    if (!message.usage) message.problem ||= INTERRUPTED;
    if (!saw.pieces && !message.usage) refused = message.problem;
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else if (error instanceof Refused) message.problem = refused = error.message;
    else message.problem = INTERRUPTED;
  } finally {
    clearInterval(waiting);
    view.waits.hidden = true;
    if (!message.usage && message.request) message.partial = saw;
    running = null;
    node.removeAttribute("aria-busy");
    els.send.textContent = "Send";
    els.send.classList.remove("stop");
    if (els.notice.textContent === BUSY) notice("");
    view.update();
    lastButtons();
    if (following) toEnd();
    say(message.problem || (message.stopped ? "Stopped." : "The answer is complete."));
    save();
  }
  if (message.partial && message.stopped) await ofPrompt(message, view);
  if (!refused && model()?.omlxd.state !== "ready") lookAtModels(); // It was loaded meanwhile.
  return refused;
}

/** What the daemon knows of the prompt of an answer that was stopped. */
async function ofPrompt(message, view) {
  try {
    const known = (await json("/omlxd/requests")).requests.find((each) => each.id === message.request);
    if (!known?.prompt_tokens) return;
    Object.assign(message.partial, { prompt: known.prompt_tokens, restored: Math.max(0, known.cached_tokens) });
    view.update();
    save();
  } catch {
    // Then the figures are those of this page alone.
  }
}

function waits(view, began) {
  const { message } = view;
  const started = message.content || message.reasoning || message.calls.length;
  view.waits.hidden = Boolean(started);
  const state = model()?.omlxd.state;
  if (!started) view.waits.textContent = `${state && state !== "ready" ? "Loading the model, reading the prompt" : "Reading the prompt"}… ${Math.round((performance.now() - began) / 1000)} s`;
}

// ------------------------------------------------------------------- what is typed, pasted, dropped

function typed(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (running) notice(BUSY);
  else sendNow();
}

// CSS makes the field as high as its text where the browser can; this is for the others.
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  els.text.rows = Math.min(10, els.text.value.split("\n").length);
}

function pasted(event) {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    images.add(event.clipboardData.files);
  }
}

function chosen() {
  images.add(els.file.files);
  els.file.value = "";
}
