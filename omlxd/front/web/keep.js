// A conversation in this tab's session storage.

const STORE = "omlxd.chat";

export function fresh() {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { session: `page-${[...random].map((each) => each.toString(36)).join("")}`, messages: [], options: {} };
}

/** What there is of a conversation, with those messages that `is` says to be messages. */
export function kept(is) {
  const found = {};
  try {
    const { session, messages, options, draft } = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    if (typeof session === "string") found.session = session;
    if (typeof options === "object") found.options = { ...options };
    if (typeof draft === "string") found.draft = draft;
    if (Array.isArray(messages)) found.messages = messages.filter(is);
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
