// The list of kept conversations beside the chat: search, open, rename, delete, export and import.

import { ago, button, counted, h, number, put, say } from "./dom.js";
import { alike, headOf, taken, written } from "./keep.js";
import { keyNow, onKey } from "./net.js";
import * as store from "./store.js";

const SAVE_MS = 300;
const SEARCH_MS = 200;
const SHOWN = 200;
const MOST_FILE = 200 << 20;

export class Chats {
  /**
   * `opened(chat)` shows a conversation; `longer(chat)`: what is kept of the one that is shown, which the tab may
   * have had no room for; `gone(ids)`: these are no more; `begin()` begins one.
   */
  constructor({ opened, longer, gone, begin }) {
    this.opened = opened;
    this.longer = longer;
    this.gone = gone;
    this.owner = "";
    this.heads = [];
    this.current = "";
    this.keeping = true;
    this.shown = SHOWN;
    this.waiting = null; // The conversation that is to be written.
    this.timer = 0;
    this.search = h("input", { type: "search", id: "chats-search", placeholder: "Search", autocomplete: "off", "aria-label": "Search conversations", oninput: () => {
      clearTimeout(this.searching);
      this.searching = setTimeout(() => this.draw(), SEARCH_MS);
    } });
    this.list = h("ul", { class: "chat-list" });
    this.told = h("p", { class: "hint", role: "status" });
    this.file = h("input", { type: "file", accept: "application/json,.json", onchange: () => this.take() });
    this.off = h("input", { type: "checkbox", id: "chats-keep", onchange: () => this.keep(this.off.checked) });
    this.element = h("aside", { class: "chats", id: "chats", "aria-label": "Conversations" },
      h("div", { class: "row" }, this.search, button("New", begin, { class: "main", "aria-label": "New conversation" })),
      this.list, this.told,
      h("div", { class: "chats-foot" },
        h("p", { class: "row" },
          button("Export all", () => this.give(this.heads), { class: "quiet", failed: (error) => this.failed(error) }),
          button("Import", () => this.file.click(), { class: "quiet" })),
        h("p", { class: "row" }, this.off, h("label", { for: "chats-keep" }, "Keep conversations")),
        h("p", { class: "hint" }, "They lie in this browser alone, on this machine, unencrypted.")));
    onKey(() => this.start());
  }

  /** Look whose conversations these are, and list them. */
  async start(key = keyNow()) {
    try {
      this.owner = await store.ownerOf(key);
      this.keeping = (await store.setting("keep")) !== false && this.owner !== null;
      this.off.checked = this.keeping;
      await this.look();
      const whole = this.current && this.heads.some((head) => head.id === this.current) && await store.read(this.current);
      if (whole) this.longer(whole);
      if (this.owner === null) this.told.textContent = "With a key, and without TLS from another machine, the browser keeps none.";
    } catch {
      this.keeping = false;
      this.off.checked = false;
      this.told.textContent = "This browser keeps no conversations (a private window?).";
    }
  }

  async look() {
    this.heads = this.owner === null ? [] : await store.list(this.owner);
    await this.draw();
  }

  failed(error) {
    this.told.textContent = error.message || "The browser could not do that.";
  }

  async draw() {
    const words = this.search.value.trim();
    const heads = words ? await store.search(this.heads, words) : this.heads;
    if (words !== this.search.value.trim()) return; // Typed on meanwhile.
    put(this.list, heads.slice(0, this.shown).map((head) => this.row(head)),
      heads.length > this.shown ? h("li", {}, button(`Show ${heads.length - this.shown} more`, () => { this.shown += SHOWN; return this.draw(); }, { class: "quiet" })) : null);
    this.told.textContent = words ? `${counted(heads.length, "conversation")} found` : this.heads.length ? "" : "None is kept yet.";
  }

  row(head) {
    const acts = h("span", { class: "chat-acts" });
    const failed = (error) => this.failed(error);
    const usual = () => put(acts,
      button("Rename", () => this.name(head, item), { class: "quiet", "aria-label": `Rename ${head.title}` }),
      button("Export", () => this.give([head]), { class: "quiet", "aria-label": `Export ${head.title}`, failed }),
      button("Delete", () => {
        const yes = button("Yes, delete", () => this.delete(head), { class: "quiet danger", failed });
        put(acts, yes, button("Keep", usual, { class: "quiet" }));
        yes.focus();
      }, { class: "quiet", "aria-label": `Delete ${head.title}` }));
    usual();
    const open = h("button", { type: "button", class: "chat-open", "aria-current": head.id === this.current ? "true" : null, onclick: () => this.open(head) },
      h("bdi", {}, head.title), h("span", { class: "hint" }, `${counted(head.turns, "turn")}, ${ago(head.at / 1000)}`));
    const item = h("li", { "data-id": head.id }, open, acts);
    return item;
  }

  async open(head) {
    await this.flush();
    const chat = await store.read(head.id);
    if (!chat) return;
    this.mark(head.id);
    this.opened(chat);
  }

  /** Which conversation is shown. */
  mark(id) {
    this.current = id;
    for (const each of this.list.querySelectorAll("li[data-id]")) {
      if (each.dataset.id === id) each.firstChild.setAttribute("aria-current", "true");
      else each.firstChild.removeAttribute("aria-current");
    }
  }

  name(head, item) {
    const field = h("input", { type: "text", "aria-label": "New name" });
    field.value = head.title;
    const form = h("form", { class: "chat-name" }, field);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const title = field.value.trim().slice(0, 200);
      if (title) await store.rename(head, title).catch((error) => this.failed(error));
      await this.look();
      say("Renamed");
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.draw();
    });
    item.replaceChildren(form);
    field.select();
  }

  async delete(head) {
    await this.flush();
    await store.remove([head.id]);
    this.gone([head.id]);
    await this.look();
    say("Deleted");
  }

  /** Keep the conversations from now on, or only in their tab. */
  async keep(yes) {
    this.keeping = yes && this.owner !== null;
    this.off.checked = this.keeping;
    await store.set("keep", yes).catch((error) => this.failed(error));
    if (!yes && this.heads.length) {
      put(this.told, `${counted(this.heads.length, "conversation")} of before ${this.heads.length === 1 ? "is" : "are"} here still. `,
        button("Delete all", async () => {
          const ids = this.heads.map((head) => head.id);
          await store.remove(ids);
          this.gone(ids);
          await this.look();
        }, { class: "danger", failed: (error) => this.failed(error) }));
    } else await this.draw();
  }

  /** Keep `chat` as it is now, soon. */
  later(chat) {
    if (!this.keeping || !chat.messages.length) return;
    if (this.waiting && this.waiting.session !== chat.session) this.flush();
    this.waiting = chat;
    this.current = chat.session;
    this.timer ||= setTimeout(() => this.flush(), SAVE_MS);
  }

  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    const chat = this.waiting;
    this.waiting = null;
    if (chat && this.keeping) await this.write(chat);
  }

  async write(chat, title = "") {
    const former = title ? { title, named: true } : this.heads.find((head) => head.id === chat.session);
    const { session, messages, options } = chat;
    try {
      await store.write(headOf(chat, this.owner, former), { session, messages, options });
      await this.look();
    } catch (error) {
      this.told.textContent = `The browser could not keep this conversation: ${error.message}`;
    }
  }

  // ----------------------------------------------------------------- files

  async give(heads) {
    await this.flush();
    const all = [];
    for (const head of heads) {
      const chat = await store.read(head.id);
      if (chat) all.push({ ...head, chat });
    }
    const url = URL.createObjectURL(new Blob([written(all)], { type: "application/json" }));
    h("a", { href: url, download: `omlxd-conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
    this.told.textContent = `${counted(all.length, "conversation")} exported`;
  }

  /** Whether a file's conversation is here: its messages, and its id or its date. */
  async has(id, at, chat) {
    for (const head of this.heads.filter((each) => each.id === id || each.at === at)) {
      const known = await store.read(head.id);
      if (known && alike(known, chat)) return true;
    }
    return false;
  }

  async take() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      if (!this.keeping) throw new Error("Conversations are not kept: tick it first.");
      if (file.size > MOST_FILE) throw new Error("This file is larger than 200 MiB.");
      const all = taken(await file.text());
      let skipped = 0;
      for (const { id, title, at, chat } of all) {
        if (await this.has(id, at, chat)) {
          skipped += 1;
          continue;
        }
        if (id && !await store.read(id)) chat.session = id; // Else it would take another's place.
        await store.write({ ...headOf(chat, this.owner, title ? { title, named: true } : undefined), at }, chat);
      }
      await this.look();
      const there = skipped ? `, ${number(skipped)} skipped: here already` : "";
      this.told.textContent = `${counted(all.length - skipped, "conversation")} imported${there}`;
    } catch (error) {
      this.failed(error);
    }
  }
}
