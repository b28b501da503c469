// What the daemon does now, and did in the last hour. The stream is open only while somebody looks.

import { bytes, counted, h, number, seconds } from "./dom.js";
import { chart, whole } from "./charts.js";
import { Refused, events, send } from "./net.js";

const HOUR_SLOTS = 120;
const LIVE = 120;
const AGAIN_MS = 3000;

let els = {};
let slots = new Map();
let live = []; // {rate, running, waiting}
let before = null;
let watching = null;
let wanted = false;
let seen = null; // When the last figures came.

export function start(section) {
  els.tiles = h("dl", { class: "tiles" });
  els.hits = chart("Hit rate, last hour", (value) => `${Math.round(value * 100)}%`);
  els.ttft = chart("TTFT, last hour", seconds);
  els.rate = chart("Tokens a second, now", (value) => number(value));
  els.load = chart("Requests in flight, now", (value) => number(value));
  els.memory = h("div", { class: "panel" });
  els.tiers = h("div", { class: "panel" });
  els.engines = h("div", { class: "wide folds", tabindex: 0, role: "region", "aria-label": "Engines" });
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  els.about = h("p", { class: "hint" });
  els.section = section;
  section.append(
    h("h2", { class: "unseen" }, "Status"), els.problem, els.tiles,
    h("div", { class: "grid" }, els.hits.element, els.ttft.element, els.rate.element, els.load.element),
    h("div", { class: "grid" },
      h("section", { "aria-labelledby": "memory-title" }, h("h2", { id: "memory-title" }, "Memory"), els.memory),
      h("section", { "aria-labelledby": "tiers-title" }, h("h2", { id: "tiers-title" }, "Cache tiers"), els.tiers)),
    h("h2", {}, "Engines"), els.engines, els.about);
  document.addEventListener("visibilitychange", () => {
    if (!wanted) return;
    if (document.hidden) close();
    else watch();
  });
}

export function show() {
  wanted = true;
  watch();
}

export function hide() {
  wanted = false;
  close();
}

function close() {
  watching?.abort();
  watching = null;
}

async function watch() {
  if (watching) return;
  const mine = (watching = new AbortController());
  while (watching === mine) {
    try {
      const answer = await send("/omlxd/events", { signal: mine.signal });
      slots = new Map();
      before = null;
      for await (const look of events(answer)) {
        if (watching !== mine) return;
        els.problem.hidden = true;
        els.section.classList.remove("stale");
        seen = new Date();
        take(look);
      }
      throw new Error();
    } catch (error) {
      if (watching !== mine) return;
      const lost = error instanceof Refused ? error.message : "The daemon has stopped, or restarts.";
      els.problem.textContent = seen ? `${lost} What stands below is of ${seen.toLocaleTimeString()}.` : lost;
      els.problem.hidden = false;
      els.section.classList.add("stale");
      if (error.status === 401) {
        watching = null;
        return;
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}

// ------------------------------------------------------------------- figures

function take(look) {
  const { status, slot_s: slotSeconds } = look;
  const now = Date.now() / 1000;
  for (const slot of look.slots) slots.set(slot.at, slot);
  for (const at of slots.keys()) if (at < now - 3600 - slotSeconds) slots.delete(at);
  const sum = (name) => status.models.reduce((all, model) => all + (model.values?.[name] ?? 0), 0);
  const clock = performance.now() / 1000;
  const generated = sum("generation_tokens_total");
  const count = (name) => status.models.reduce((all, model) => all + (model[name] ?? 0), 0);
  if (before) live.push({ rate: Math.max(0, generated - before.generated) / (clock - before.clock), running: count("running"), waiting: count("waiting") });
  live = live.slice(-LIVE);
  before = { generated, clock };
  tiles(status, look);
  hour(slotSeconds, now);
  moment();
  memory(status, look);
  tiers(status);
  engines(status);
  els.about.textContent = `omlxd ${status.version}, process ${status.pid}, up for ${seconds(status.uptime_s)}.`;
}

const add = (values, name) => values.reduce((all, value) => all + value[name], 0);

function tiles(status) {
  const all = [...slots.values()];
  const prompt = add(all, "prompt");
  const first = add(all, "first");
  const last = live.at(-1);
  const running = status.models.reduce((sum, model) => sum + (model.running ?? 0), 0);
  const waiting = status.models.reduce((sum, model) => sum + (model.waiting ?? 0), 0);
  const rows = [
    ["In flight", waiting ? `${running} + ${waiting} waiting` : `${running}`],
    ["Tokens a second", last ? number(last.rate) : "–"],
    ["Requests, last hour", number(add(all, "requests"))],
    ["Hit rate, last hour", prompt ? `${Math.round((100 * (add(all, "cached_hot") + add(all, "cached_cold"))) / prompt)}%` : "–"],
    ["Mean TTFT, last hour", first ? seconds(add(all, "ttft_sum") / first) : "–"],
  ];
  els.tiles.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function hour(slotSeconds, now) {
  const newest = Math.floor(now / slotSeconds) * slotSeconds;
  const row = Array.from({ length: HOUR_SLOTS }, (_, at) => slots.get(newest - (HOUR_SLOTS - 1 - at) * slotSeconds) ?? null);
  const all = row.filter(Boolean);
  const prompt = add(all, "prompt");
  const time = (at) => new Date((newest - (HOUR_SLOTS - 1 - at) * slotSeconds) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const part = (slot, name) => slot[name] / Math.max(1, slot.prompt);
  const percent = (value) => `${Math.round(100 * value)}%`;
  els.hits.draw({
    columns: row.map((slot) => slot && [part(slot, "cached_hot"), part(slot, "cached_cold"), 1 - part(slot, "cached_hot") - part(slot, "cached_cold")]),
    parts: [["RAM", "ram"], ["SSD", "ssd"], ["computed", "computed"]],
    top: 1, from: "60 min ago",
    tell: (at) => `${time(at)}: ${percent(part(row[at], "cached_hot"))} RAM, ${percent(part(row[at], "cached_cold"))} SSD of ${number(row[at].prompt)} tokens`,
    summary: prompt ? `${percent((add(all, "cached_hot") + add(all, "cached_cold")) / prompt)} of ${number(prompt)} prompt tokens` : "no request yet",
  });
  const answered = all.filter((slot) => slot.first);
  els.ttft.draw({
    columns: row.map((slot) => (slot?.first ? [slot.ttft_sum / slot.first] : null)),
    peaks: row.map((slot) => (slot?.first > 1 ? slot.ttft_max : 0)),
    parts: [["mean", "third"]], more: [h("span", { class: "key peak" }, "longest")],
    top: Math.max(0.1, ...answered.map((slot) => slot.ttft_max)), from: "60 min ago",
    tell: (at) => `${time(at)}: mean ${seconds(row[at].ttft_sum / row[at].first)}, longest ${seconds(row[at].ttft_max)} of ${row[at].first}`,
    summary: answered.length ? `mean ${seconds(add(answered, "ttft_sum") / add(answered, "first"))}, longest ${seconds(Math.max(...answered.map((slot) => slot.ttft_max)))}` : "no request yet",
  });
}

function moment() {
  const row = [...Array.from({ length: LIVE - live.length }, () => null), ...live];
  const last = live.at(-1);
  const most = (name) => Math.max(1, ...live.map(name));
  els.rate.draw({
    columns: row.map((each) => each && [each.rate]), parts: [["", "ram"]], top: most((each) => each.rate), from: "4 min ago",
    tell: (at) => `${number(row[at].rate)} tokens a second`, summary: last ? `${number(last.rate)}` : "",
  });
  els.load.draw({
    columns: row.map((each) => each && [each.running, each.waiting]), parts: [["running", "ram"], ["waiting", "ssd"]],
    top: most((each) => each.running + each.waiting), from: "4 min ago",
    tell: (at) => `${row[at].running} running, ${row[at].waiting} waiting`, summary: last ? `${last.running} running, ${last.waiting} waiting` : "",
  });
}

function memory(status, look) {
  const loaded = status.models.filter((model) => model.values?.mlx_active_bytes !== undefined);
  const rows = loaded.map((model) => {
    const held = model.values;
    const weights = model.weight_bytes ?? 0;
    const hot = held.kv_hot_bytes ?? 0;
    return whole(`MLX arrays of ${model.id}`, 0, [
      ["weights", "third", weights], ["live KV and work", "ssd", Math.max(0, held.mlx_active_bytes - weights - hot)],
      ["RAM tier", "ram", hot], ["freed, kept for reuse", "computed", held.mlx_cache_bytes ?? 0]], bytes);
  });
  const processes = loaded.reduce((all, model) => all + (model.resident ?? 0), 0) + status.resident;
  els.memory.replaceChildren(...rows, whole("This machine", look.memory_total, [
    ["processes of omlxd", "ram", processes], ["others", "computed", Math.max(0, look.memory_total - look.memory_available - processes)]], bytes));
}

function daily(cold) {
  const most = cold.daily_write_budget;
  return most ? `, of ${bytes(most)} a day${cold.write_budget_used_up ? " (writing stops until midnight)" : ""}` : "";
}

function tiers(status) {
  const rows = status.models.filter((model) => model.values?.kv_hot_budget_bytes).map((model) =>
    whole(`RAM, ${model.id}`, model.values.kv_hot_budget_bytes, [["in use", "ram", model.values.kv_hot_bytes ?? 0]], bytes));
  const { cold } = status;
  if (cold) {
    rows.push(whole("SSD", cold.cap, [["in use", "ssd", cold.bytes]], bytes),
      h("p", { class: "hint" }, `${counted(cold.files, "file")} in ${cold.dir}${cold.evicted_files ? `, ${number(cold.evicted_files)} evicted` : ""}${cold.folder_away ? "; the folder is away" : ""}`),
      h("p", { class: "hint" }, `Written to SSD: ${bytes(cold.written_today)} today${daily(cold)}, ${bytes(cold.written_ever)} in all`));
  } else rows.push(h("p", { class: "hint" }, "There is no SSD cache."));
  els.tiers.replaceChildren(...rows);
}

function ofRank(rank) {
  const disk = { full: "; its disk is full", off: "; its disk fails" }[rank.disk] ?? "";
  return h("div", { class: disk ? "problem" : "hint" }, `rank ${rank.rank}${rank.host ? ` on ${rank.host}` : ""}: process ${rank.pid}, ${bytes(rank.resident)}; MLX ${bytes(rank.mlx)}, RAM tier ${bytes(rank.hot)}${rank.cold == null ? "" : `, SSD ${bytes(rank.cold)}`}${disk}`);
}

function engines(status) {
  const head = ["Model", "State", "Running", "Waiting", "Process", "Context", "Prefill", "Backend"];
  const rows = status.models.map((model) => [
    h("span", {}, model.id, model.trouble ? h("div", { class: "problem" }, model.trouble) : null, ...(model.ranks ?? []).map(ofRank)),
    model.state, number(model.running ?? 0), number(model.waiting ?? 0),
    model.pid ? `${model.pid}${model.starts > 1 ? `, start ${model.starts}` : ""}` : "–",
    model.context_length ? number(model.context_length) : "–",
    model.values?.prefill_tokens_per_s ? `${number(model.values.prefill_tokens_per_s)} tokens/s` : "–", model.backend ?? "–"]);
  els.engines.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell, at) => h("td", { "data-name": head[at] }, cell)))))));
}
