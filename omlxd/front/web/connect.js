// How other programs reach this daemon: its addresses, and commands to copy.

import { copy } from "./copy.js";
import { h, put } from "./dom.js";
import { hasKey, json } from "./net.js";

let els = {};

export function start(section) {
  els.all = h("div", { class: "connect" });
  els.problem = h("p", { class: "problem", role: "alert", hidden: true });
  section.append(h("h2", { class: "unseen" }, "Connect"), els.problem, els.all);
}

export async function show() {
  try {
    const { data } = await json("/v1/models");
    els.problem.hidden = true;
    draw(data.find((model) => model.omlxd.kind === "chat")?.id ?? "MODEL");
  } catch (error) {
    els.problem.textContent = error.message;
    els.problem.hidden = false;
  }
}

/** A line to copy. */
const line = (text, name) => h("div", { class: "copyable" }, h("code", {}, text), copy("Copy", () => text, `Copy ${name}`));

const quoted = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const AGENTS = [["Claude Code", "claude"], ["Codex", "codex"], ["opencode", "opencode"], ["Gemini CLI", "gemini"], ["Qwen Code", "qwen-code"], ["Continue", "continue"], ["Crush", "crush"], ["pi", "pi"], ["goose", "goose"], ["aider", "aider"], ["Copilot", "copilot"]];

function draw(model) {
  const { origin } = location;
  const key = hasKey() ? "YOUR-KEY" : "none";
  const curl = `curl ${origin}/v1/chat/completions${hasKey() ? " -H 'Authorization: Bearer YOUR-KEY'" : ""} -H 'Content-Type: application/json' -d '${JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }).replaceAll("'", "'\\''")}'`;
  const card = (title, said, ...rows) => h("section", { class: "panel" }, h("h3", {}, title), said ? h("p", { class: "hint" }, said) : null, ...rows);
  const row = (name, text) => h("div", { class: "connect-row" }, h("span", {}, name), line(text, name));
  put(els.all,
    card("Address", hasKey() ? "Programs need a key, too: `omlxd key add NAME` makes one for each." : "This daemon asks for no key. A program that insists on one may be given any word.",
      row("OpenAI", `${origin}/v1`), row("Anthropic", origin), row("Ollama", origin), row("Model", model)),
    card("Coding agents", "Each command starts the agent with this daemon's models; the agent's own settings stay as they are.",
      ...AGENTS.map(([name, verb]) => row(name, `omlxd launch ${verb} --url ${origin}`))),
    card("In a terminal", "", row("Chat", `omlxd chat --url ${origin}`), row("One question", curl),
      row("For programs that speak OpenAI", `export OPENAI_BASE_URL=${origin}/v1 OPENAI_API_KEY=${key}`),
      row("For programs that speak Anthropic", `export ANTHROPIC_BASE_URL=${origin} ANTHROPIC_AUTH_TOKEN=${key} ANTHROPIC_MODEL=${quoted(model)}`)));
}
