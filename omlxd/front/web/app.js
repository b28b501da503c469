// The views, and the key that a daemon may ask for.

import { hasKey, onKeyNeeded, useKey } from "./net.js";
import * as chat from "./chat.js";
import * as status from "./status.js";
import * as cache from "./cache.js";
import * as models from "./models.js";
import * as connect from "./connect.js";

const VIEWS = { chat, status, cache, models, connect };
const started = new Set();
const find = (id) => document.getElementById(id);
let current = "";

function show() {
  const asked = location.hash.slice(2);
  const name = asked in VIEWS ? asked : "chat";
  if (name === current) return;
  VIEWS[current]?.hide?.();
  current = name;
  document.title = `${name[0].toUpperCase()}${name.slice(1)} – omlxd`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  if (!started.has(name)) {
    started.add(name);
    VIEWS[name].start(find(name));
  }
  VIEWS[name].show();
}

// ------------------------------------------------------------------- the key

const dialog = find("key-dialog");
let keyMissing = false; // The daemon asks for a key, and its owner gave none.

onKeyNeeded((again) => new Promise((resolve) => {
  const input = find("key-input");
  find("key-why").hidden = false;
  input.value = "";
  input.setAttribute("aria-invalid", String(again));
  find("key-title").textContent = again ? "This key is wrong" : "This daemon asks for a key";
  const close = (key) => {
    dialog.close();
    dialog.oncancel = null;
    find("key-form").onsubmit = null;
    resolve(key);
    keyMissing = !key;
    setTimeout(keyButton); // Once the key is in use.
  };
  find("key-form").onsubmit = (event) => {
    event.preventDefault();
    close(input.value.trim());
  };
  find("key-cancel").onclick = () => close("");
  dialog.oncancel = () => close("");
  dialog.showModal();
  input.focus();
}));

function keyButton() {
  find("key-button").hidden = !hasKey() && !keyMissing;
  find("key-button").textContent = keyMissing ? "Enter key" : "Forget key";
}

find("key-button").addEventListener("click", () => {
  useKey("");
  if (!keyMissing) chat.forget();
  location.reload(); // No view shows any more what the key gave.
});

find("skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});

addEventListener("hashchange", show);
keyButton();
show();
