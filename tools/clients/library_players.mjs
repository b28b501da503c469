// A program: one JavaScript library against a server whose model plays scenarios (script.py).
//
//     node library_players.mjs LIBRARY URL MODEL
//
// The four parts and the lines of JSON of library_players.py. It stands beside the node_modules it needs.

import { readFileSync } from "node:fs";

const SAID = "Hello. I am the scripted model.";
const [HELLO, WEATHER, PERSON] = ["hello", "weather", "person"].map((name) => `Scenario ${name} in /x.`);
const asked = [];

function getWeather({ city, days }) {
  asked.push(`${city} ${days}`);
  return `snow in ${city}`;
}

function joined(pieces) {
  const texts = pieces.filter(Boolean);
  if (texts.length < 3) throw new Error(`it came in ${texts.length} pieces`);
  return texts.join("");
}

async function ollama(url, model) {
  const { Ollama } = await import("ollama");
  const client = new Ollama({ host: url });
  const properties = { city: { type: "string" }, days: { type: "integer" } };
  const parameters = { type: "object", properties, required: ["city", "days"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters } }];
  const ask = (text, more = {}) => client.chat({ model, messages: [{ role: "user", content: text }], ...more });
  return {
    chat: async () => (await ask(HELLO)).message.content,
    stream: async () => {
      const pieces = [];
      for await (const part of await ask(HELLO, { stream: true })) pieces.push(part.message.content);
      return joined(pieces);
    },
    tools: async () => {
      const messages = [{ role: "user", content: WEATHER }];
      for (;;) {
        const { message } = await client.chat({ model, messages, tools });
        messages.push(message);
        if (!message.tool_calls) return message.content;
        for (const { function: call } of message.tool_calls)
          messages.push({ role: "tool", tool_name: call.name, content: getWeather(call.arguments) });
      }
    },
    structured: async () => {
      const person = { name: { type: "string" }, age: { type: "integer" } };
      const format = { type: "object", properties: person, required: ["name", "age"] };
      return JSON.parse((await ask(PERSON, { format })).message.content);
    },
  };
}

async function aiSdk(model) {
  const { generateText, isStepCount, Output, streamText, tool } = await import("ai");
  const { z } = await import("zod");
  const schema = z.object({ name: z.string(), age: z.number().int() });
  const inputSchema = z.object({ city: z.string(), days: z.number().int() });
  const get_weather = tool({ description: "The weather.", inputSchema, execute: getWeather });
  const fixed = { model, maxRetries: 0 };
  return {
    chat: async () => (await generateText({ ...fixed, prompt: HELLO })).text,
    stream: async () => {
      const pieces = [];
      const failures = [];
      const onError = ({ error }) => failures.push(error);
      for await (const piece of streamText({ ...fixed, prompt: HELLO, onError }).textStream) pieces.push(piece);
      if (failures.length) throw failures[0];
      return joined(pieces);
    },
    tools: async () =>
      (await generateText({ ...fixed, prompt: WEATHER, tools: { get_weather }, stopWhen: isStepCount(5) })).text,
    structured: async () =>
      (await generateText({ ...fixed, prompt: PERSON, output: Output.object({ schema }) })).output,
  };
}

async function aiSdkOpenai(url, model) {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const named = { name: "omlxd", apiKey: "none", supportsStructuredOutputs: true };
  return aiSdk(createOpenAICompatible({ ...named, baseURL: `${url}/v1` })(model));
}

async function aiSdkAnthropic(url, model) {
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  return aiSdk(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model));
}

async function aiSdkOllama(url, model) {
  const { createOllama } = await import("ai-sdk-ollama");
  return aiSdk(createOllama({ baseURL: url })(model));
}

const PLAYERS = {
  "ollama-js": ["ollama", ollama],
  "ai-sdk-openai-compatible": ["@ai-sdk/openai-compatible", aiSdkOpenai],
  "ai-sdk-anthropic": ["@ai-sdk/anthropic", aiSdkAnthropic],
  "ai-sdk-ollama": ["ai-sdk-ollama", aiSdkOllama],
};

async function problemOf(part, play) {
  asked.length = 0;
  try {
    const got = await play();
    if (part === "structured") return got?.name === "Ada" && got.age === 36 ? "" : `it gave ${JSON.stringify(got)}`;
    const wanted = part === "tools" ? "Snow in both." : SAID;
    if (String(got).trim() !== wanted) return `it said ${JSON.stringify(got)}`;
    const calls = asked.join(", ");
    return part === "tools" && calls !== "Oslo 2, Røros 1" ? `the tool was called with ${calls}` : "";
  } catch (error) {
    return `${error.name}: ${error.message}`.slice(0, 300);
  }
}

const [library, url, model] = process.argv.slice(2);
const [name, player] = PLAYERS[library];
const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
console.log(JSON.stringify({ version }));
for (const [part, play] of Object.entries(await player(url, model)))
  console.log(JSON.stringify({ part, problem: await problemOf(part, play) }));
process.exit(0);
