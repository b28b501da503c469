// Conversations that this browser keeps, in its own database (IndexedDB): they never leave it by themselves.
//
// The daemon keeps no text of a prompt, and any program of the machine may ask it; what a browser keeps lies in
// its user's profile, and no other site can read it. Each key has conversations of its own.

const NAME = "omlxd";
const HEADS = "heads"; // {id, owner, title, named, at, turns}
const CHATS = "chats"; // {id, chat}: what a head is of
const SETTINGS = "settings"; // {id, value}

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      for (const name of [HEADS, CHATS, SETTINGS]) asked.result.createObjectStore(name, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  }).catch((error) => {
    opening = null;
    throw error;
  });
  return opening;
}

/** What `work` asks of the stores, in one transaction: all of it is done, or nothing. */
async function within(names, mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(names, mode);
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
    const asked = work(...names.map((name) => transaction.objectStore(name)));
    if (asked) asked.onsuccess = () => { result = asked.result; };
  });
}

/** Whose conversations go with `key`; null: the browser can't tell keys apart, and nothing is kept. */
export async function ownerOf(key) {
  if (!key) return "";
  if (!globalThis.crypto?.subtle) return null;
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(`omlxd ${key}`));
  return [...new Uint8Array(digest)].slice(0, 12).map((each) => each.toString(16).padStart(2, "0")).join("");
}

/** Heads of the owner's conversations, the newest first. */
export async function list(owner) {
  const heads = await within([HEADS], "readonly", (store) => store.getAll());
  return heads.filter((head) => head.owner === owner).sort((one, other) => other.at - one.at);
}

export const read = async (id) => (await within([CHATS], "readonly", (store) => store.get(id)))?.chat;

export const write = (head, chat) => within([HEADS, CHATS], "readwrite", (heads, chats) => {
  heads.put(head);
  chats.put({ id: head.id, chat });
});

export const rename = (head, title) => within([HEADS], "readwrite", (heads) => { heads.put({ ...head, title, named: true }); });

export const remove = (ids) => within([HEADS, CHATS], "readwrite", (heads, chats) => {
  for (const id of ids) {
    heads.delete(id);
    chats.delete(id);
  }
});

/** Those of `heads` whose title or text has all of `words`. */
export async function search(heads, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const head of heads) { // One after the other: not all of them in memory.
    const chat = await read(head.id);
    const text = [head.title, ...(chat?.messages ?? []).map((message) => message.content)].join("\n").toLowerCase();
    if (wanted.every((word) => text.includes(word))) found.push(head);
  }
  return found;
}

export const setting = async (id) => (await within([SETTINGS], "readonly", (store) => store.get(id)))?.value;

export const set = (id, value) => within([SETTINGS], "readwrite", (store) => { store.put({ id, value }); });
