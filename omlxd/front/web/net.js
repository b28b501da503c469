// Requests to this daemon, and to nothing else. The key lives in the tab: in sessionStorage, never in a cookie.

const KEY = "omlxd.key";
let key = "";
let askForKey = async () => "";
let asking = null;

try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // A browser may keep nothing: then the key lives in memory.
}

export const hasKey = () => key !== "";
export const keyNow = () => key;

let changed = () => {};

/** `act` is called after each change of the key. */
export function onKey(act) {
  changed = act;
}

export function useKey(text) {
  key = text.trim();
  changed();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** `ask(again)` gives a key, or "" if its owner gives none; `again`: the last one was wrong. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** What the daemon refused, in its own words. */
export class Refused extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The answer to a request; a `body` makes it a POST of JSON. Raises Refused. Asks for a key where one is needed. */
export async function send(path, { body, signal, headers = {}, method } = {}) {
  for (;;) {
    const sent = key;
    const all = { ...headers };
    if (sent) all.Authorization = `Bearer ${encodable(sent)}`;
    if (body !== undefined) all["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, {
        method: method ?? (body === undefined ? "GET" : "POST"),
        headers: all,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The daemon does not answer. Is it running?");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (sent !== key) continue; // Another request has asked meanwhile.
      asking ??= askForKey(sent !== "").finally(() => { asking = null; });
      const given = await asking;
      if (given) {
        useKey(given);
        continue;
      }
    }
    const { message, code } = await reason(answer);
    throw new Refused(message, answer.status, code);
  }
}

// A header holds bytes: a key of other characters is a wrong one, and not an error of fetch.
const encodable = (text) => (/^[\x20-\x7e]+$/.test(text) ? text : "?");

export const json = async (path, options) => (await send(path, options)).json();

async function reason(answer) {
  try {
    const { error } = await answer.json();
    return typeof error === "string" ? { message: error } : error;
  } catch {
    return { message: `The daemon answered with status ${answer.status}.` };
  }
}

async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The JSON values of a stream of server-sent events, up to [DONE]. */
export async function* events(answer) {
  for await (const line of lines(answer)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
}
