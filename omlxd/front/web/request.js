// What is sent to the daemon for a conversation, and what its stream adds to the answer.

/** The request for these messages. Raises where the options make none. */
export function body(model, all, { system, temperature, max_tokens, thinking, tools }) {
  const messages = all.filter((message) => message.role !== "assistant" || message.content || message.calls?.length).map(asSent);
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  const made = { model, messages, stream: true, stream_options: { include_usage: true } };
  if (temperature) made.temperature = Number(temperature);
  if (max_tokens) made.max_tokens = Number(max_tokens);
  if (max_tokens && !(Number.isInteger(made.max_tokens) && made.max_tokens > 0)) throw new Error("Longest answer of the options: write a whole number above 0.");
  if (thinking) made.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (tools?.trim()) {
    try {
      made.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`The tools of the options are no JSON: ${error.message}`);
    }
    if (!Array.isArray(made.tools)) throw new Error("The tools of the options are no list: write [ and ] around them.");
  }
  return made;
}

function asSent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.id, content: message.content };
  if (message.role === "user") {
    if (!message.images?.length) return { role: "user", content: message.content };
    const parts = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: message.content ? [...parts, { type: "text", text: message.content }] : parts };
  }
  const sent = { role: "assistant", content: message.content };
  if (message.calls?.length) sent.tool_calls = message.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return sent;
}

/** True: something of the answer came. */
export function take(message, event) {
  if (event.error) {
    message.problem = event.error.message;
    return false;
  }
  const choice = event.choices?.[0];
  if (choice) {
    const { delta, finish_reason: reason } = choice;
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const known = (message.calls[part.index] ??= { id: "", name: "", text: "" });
      known.id ||= part.id ?? "";
      known.name ||= part.function?.name ?? "";
      known.text += part.function?.arguments ?? "";
    }
    if (reason === "length") message.cut = true;
  }
  if (event.usage?.omlxd) {
    const { usage } = event;
    message.usage = {
      own: usage.omlxd, prompt: usage.prompt_tokens, completion: usage.completion_tokens,
      reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
    };
  }
  return Boolean(choice && (choice.delta.content || choice.delta.reasoning_content || choice.delta.tool_calls));
}
