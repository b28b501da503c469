// The conversation of this tab, and what of a stranger's file is a conversation.

import { tame } from "./dom.js";

const STORE = "omlxd.chat";
const ROLES = ["user", "assistant", "tool"];
const TITLE = 70;
const FORMAT = "omlxd-conversations-1";
const MOST = 10000;
const ID = /^page-[a-z0-9]{1,40}$/;

export function fresh() {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { session: `page-${[...random].map((each) => each.toString(36)).join("")}`, messages: [], options: {} };
}

export const isMessage = (message) => ROLES.includes(message?.role) && typeof message.content === "string";

/** What there is of a conversation in this tab. */
export function kept() {
  const found = {};
  try {
    const { session, messages, options, draft } = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    if (typeof session === "string") found.session = session;
    if (typeof options === "object") found.options = { ...options };
    if (typeof draft === "string") found.draft = draft;
    if (Array.isArray(messages)) found.messages = messages.filter(isMessage);
  } catch {
    // What can't be read is no conversation.
  }
  return found;
}

/** False: the browser has no room for it. What was kept last then stays. */
export function keep(chat) {
  const without = (name, value) => (name === "images" ? undefined : value);
  for (const filter of [undefined, without]) {
    try {
      sessionStorage.setItem(STORE, JSON.stringify(chat, filter));
      return true;
    } catch {
      // Too long for the browser: without its images, or in memory alone.
    }
  }
  return false;
}

/** What a list shows of `chat`; `former`: its head so far. */
export function headOf(chat, owner, former) {
  const asked = chat.messages.filter((message) => message.role === "user");
  const title = former?.named ? former.title : tame(asked[0]?.content ?? "", TITLE) || "Images";
  const last = tame(asked.at(-1)?.content ?? "", TITLE);
  const same = former?.at && former.turns === asked.length && (former.last ?? last) === last; // Only a turn dates it anew.
  return { id: chat.session, owner, title, named: Boolean(former?.named), at: same ? former.at : Date.now(), turns: asked.length, last };
}

// ------------------------------------------------------------------- files

/** A file's text of `all`: {id, title, at, chat}. */
export const written = (all) => JSON.stringify({
  format: FORMAT,
  conversations: all.map(({ id, title, at, chat }) => ({ id, title, at, messages: chat.messages, options: chat.options })),
}, null, 1);

/** The conversations of a file's text: {id, title, at, chat}, each chat with a session of its own. Raises Error in a reader's words. */
export function taken(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("This file holds no conversations of omlxd.");
  if (file.conversations.length > MOST) throw new Error(`This file holds more than ${MOST} conversations.`);
  return file.conversations.map((each) => {
    const messages = (Array.isArray(each?.messages) ? each.messages : []).filter(isMessage).map(message);
    const options = Object.fromEntries(Object.entries(each?.options ?? {}).filter(([, value]) => typeof value === "string"));
    const title = typeof each?.title === "string" ? tame(each.title, TITLE) : "";
    const at = Number.isFinite(each?.at) ? Math.min(each.at, Date.now()) : Date.now();
    const id = typeof each?.id === "string" && ID.test(each.id) ? each.id : "";
    return { id, title, at, chat: { ...fresh(), messages, options } };
  }).filter(({ chat }) => chat.messages.length);
}

/** Whether two conversations have the same messages, as far as a file holds them. */
export const alike = (one, other) => said(one) === said(other);

const said = (chat) => JSON.stringify(chat.messages.filter(isMessage).map(message));

/** Of a stranger's message what the page shows and sends, of the right kinds. */
function message({ role, content, reasoning, model, images, calls, name, id, cut, stopped }) {
  const made = { role, content };
  if (role === "assistant") Object.assign(made, { reasoning: text(reasoning), calls: array(calls).map((call) => ({ id: text(call?.id), name: text(call?.name), text: text(call?.text) })) });
  if (typeof model === "string") made.model = model;
  if (role === "tool") Object.assign(made, { name: text(name), id: text(id) });
  if (role === "user" && Array.isArray(images)) made.images = images.filter((url) => typeof url === "string" && url.startsWith("data:image/"));
  if (cut === true) made.cut = true;
  if (stopped === true) made.stopped = true;
  return made;
}

const text = (value) => (typeof value === "string" ? value : "");
const array = (value) => (Array.isArray(value) ? value : []);
