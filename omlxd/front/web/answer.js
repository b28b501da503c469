// A model's answer in the log: its thoughts, text, calls, and where its prompt came from.

import { bytes, h, number, s, seconds } from "./dom.js";
import { Plain, Rendered, code } from "./markdown.js";

/** Shows `message` and whatever is added to it; draws at most once a frame, and then calls `drawn`. */
export class Answer {
  constructor(message, drawn) {
    this.drawn = drawn;
    this.message = message;
    this.thoughts = h("div", { class: "thoughts" });
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Thinking"), this.thoughts);
    this.text = h("div", { class: "said markdown" });
    this.rendered = new Rendered(this.text);
    this.thought = new Plain(this.thoughts);
    this.calls = h("div", { class: "calls" });
    this.waits = h("p", { class: "hint waits", hidden: true });
    this.problem = h("p", { class: "problem", hidden: true });
    this.figures = h("div", { class: "figures" });
    this.element = h("div", {}, this.thinking, this.text, this.calls, this.waits, this.problem, this.figures);
    this.frame = 0;
  }

  /** Soon. A hidden tab has no frames: its answer is drawn when it ends. */
  later() {
    this.frame ||= requestAnimationFrame(() => {
      this.update();
      this.drawn();
    });
  }

  update() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { message } = this;
    this.thinking.hidden = !message.reasoning;
    if (message.reasoning) {
      this.thinking.firstChild.textContent = message.content || message.usage ? "Thought" : "Thinking…";
      this.thought.show(message.reasoning);
    }
    this.rendered.show(message.content);
    this.calls.replaceChildren(...(message.calls ?? []).map(call));
    const trouble = message.problem || (message.cut ? "Cut at the limit of tokens." : message.stopped ? "Stopped." : "");
    this.problem.hidden = !trouble;
    this.problem.textContent = trouble;
    this.problem.classList.toggle("mild", !message.problem);
    this.figures.replaceChildren(...(message.usage ? figures(message.usage) : message.partial ? partial(message.partial) : []));
  }
}

function call({ name, text }) {
  let pretty = text;
  try {
    pretty = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is still being written, or no JSON: as it is.
  }
  return h("details", { class: "call", open: true }, h("summary", {}, "Calls ", h("code", {}, name || "…")), code(pretty, "json"));
}

const SOURCES = [["RAM", "ram"], ["SSD", "ssd"], ["computed", "computed"]];
const rate = (value) => (value < 99.5 ? value.toFixed(1) : number(value));

function bar(prompt, counts, sentence) {
  const total = Math.max(1, prompt);
  let at = 0;
  const parts = counts.map((count, index) => {
    const part = s("rect", { x: (1000 * at) / total, width: (1000 * count) / total, height: 8, class: SOURCES[index][1] });
    at += count;
    return part;
  });
  return s("svg", { class: "source", viewBox: "0 0 1000 8", preserveAspectRatio: "none", role: "img", "aria-label": sentence }, ...parts);
}

/** Of an answer that did not end: what this page saw, and what the daemon says of its prompt. */
function partial({ ttft, pieces, lasted, prompt, restored }) {
  const computed = ttft === null ? 0 : prompt - restored; // Without a first token, who knows how much.
  return [
    prompt ? bar(prompt, [restored, 0, computed], `Prompt of ${number(prompt)} tokens: ${number(restored)} restored`) : null,
    h("p", { class: "legend", title: "As this page saw it; a piece of text is mostly a token" },
      h("span", {}, "TTFT ", h("b", {}, ttft === null ? "–" : seconds(ttft))),
      pieces > 1 && lasted > 0 ? h("span", {}, "about ", h("b", {}, rate((pieces - 1) / lasted)), " tokens/s") : null,
      h("span", {}, "about ", h("b", {}, number(pieces)), pieces === 1 ? " token" : " tokens"),
      prompt ? h("span", { "aria-hidden": "true" }, "prompt ", h("b", {}, number(prompt)), ":") : null,
      prompt ? h("span", { "aria-hidden": "true", class: "key ram" }, h("b", {}, number(restored)), " restored") : null,
      computed ? h("span", { "aria-hidden": "true", class: "key computed" }, h("b", {}, number(computed)), " computed") : null),
  ].filter(Boolean);
}

function figures({ own, prompt, completion, reasoning }) {
  const counts = [own.cached_hot, own.cached_cold, own.computed];
  const told = counts.map((count, index) => [number(count), SOURCES[index]]).filter((_, index) => counts[index] > 0);
  const sentence = `Prompt of ${number(prompt)} tokens: ${told.map(([count, [name]]) => `${count} ${name === "computed" ? name : `from ${name}`}`).join(", ")}`;
  const tip = `queue ${seconds(own.queue_s)}, restore ${seconds(own.restore_s)}, prefill ${seconds(own.prefill_s)}, decode ${seconds(own.decode_s)}${own.peak_bytes ? `, peak ${bytes(own.peak_bytes)}` : ""}`;
  return [
    bar(prompt, counts, sentence),
    h("p", { class: "legend", title: tip },
      h("span", {}, "TTFT ", h("b", {}, seconds(own.ttft_s))),
      own.tokens_per_s ? h("span", {}, h("b", {}, rate(own.tokens_per_s)), " tokens/s") : null,
      h("span", {}, h("b", {}, number(completion)), ` tokens${reasoning ? `, ${number(reasoning)} of thinking` : ""}`),
      h("span", { "aria-hidden": "true" }, "prompt ", h("b", {}, number(prompt)), ":"),
      ...told.map(([count, [name, kind]]) => h("span", { "aria-hidden": "true", class: `key ${kind}` }, h("b", {}, count), ` ${name}`))),
  ];
}
