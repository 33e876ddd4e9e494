// What clients in JavaScript do with a server. `node checks.mjs URL` prints for each check what went wrong, or null.

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.argv[2];
const model = "demo";
const temperature = 0;
const question = [{ role: "user", content: "What is a block?" }];
const weather = [{ role: "user", content: "What is the weather in Rome?" }];
const record = "JSON please: name Ada, age 36, city Rome";
const description = "Get the weather in a city";
const Place = z.object({ city: z.string() });
const Person = z.object({ name: z.string().max(20), age: z.int().max(150), city: z.string().max(20) });
const ada = { name: "Ada", age: 36, city: "Rome" };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const forecast = ({ city }) => `{"temperature": 21, "sky": "sunny", "city": "${city}"}`;

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });

async function joined(stream, text) {
  let whole = "";
  for await (const each of stream) whole += text(each) ?? "";
  return whole;
}

const checks = {
  async "openai chat"() {
    const asked = { model, temperature, messages: question };
    const { content } = (await openai.chat.completions.create(asked)).choices[0].message;
    const streamed = await openai.chat.completions.create({ ...asked, stream: true });
    assert.equal(await joined(streamed, (chunk) => chunk.choices[0]?.delta.content), content);
    assert.equal((await openai.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.content, content);
    await assert.rejects(openai.chat.completions.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
    await assert.rejects(openai.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
  },

  async "openai chat, tools and forms"() {
    const own = { name: "get_weather", description, parameters, parse: JSON.parse, function: forecast };
    const runner = openai.chat.completions.runTools({
      model, temperature, messages: weather, tools: [{ type: "function", function: own }],
    });
    assert.match(await runner.finalContent(), /21/);
    const form = zodResponseFormat(Person, "person");
    const messages = [{ role: "user", content: record }];
    const parsed = await openai.chat.completions.parse({ model, temperature, messages, response_format: form });
    assert.deepEqual(parsed.choices[0].message.parsed, ada);
  },

  async "openai responses"() {
    const asked = { model, temperature, input: "What is a block?" };
    const text = (await openai.responses.create(asked)).output_text;
    const streamed = await openai.responses.create({ ...asked, stream: true });
    assert.equal(await joined(streamed, (event) => event.type === "response.output_text.delta" && event.delta || ""), text);
    const first = await openai.responses.create({ model, temperature, input: "My name is Ada." });
    const next = { model, temperature, input: "What is my name?", previous_response_id: first.id };
    assert.match((await openai.responses.create(next)).output_text, /Ada/);
    await openai.responses.delete(first.id);
    await assert.rejects(openai.responses.create(next), { code: "previous_response_not_found" });
  },

  async "openai responses in the background"() {
    const asked = { model, temperature, input: "What is a block?", background: true, stream: true };
    let id;
    for await (const event of await openai.responses.create(asked)) {
      id = event.response?.id;
      if (event.type === "response.created") break;
    }
    const rest = await openai.responses.retrieve(id, { stream: true, starting_after: 0 });
    const kinds = [];
    for await (const event of rest) kinds.push(event.type);
    assert.equal(kinds.at(-1), "response.completed");
  },

  async "openai responses, tools and forms"() {
    const tools = [{ type: "function", name: "get_weather", description, parameters, strict: true }];
    const called = await openai.responses.stream({ model, temperature, input: weather, tools }).finalResponse();
    assert.deepEqual(called.output[0].parsed_arguments, { city: "Rome" });
    const format = zodTextFormat(Person, "person");
    assert.deepEqual((await openai.responses.parse({ model, temperature, input: record, text: { format } })).output_parsed, ada);
    const custom = { type: "custom", name: "say", format: { type: "grammar", syntax: "regex", definition: "[a-c]{2,4}" } };
    const said = await openai.responses.create({
      model, input: "Hello", tools: [custom], tool_choice: { type: "custom", name: "say" }, reasoning: { effort: "none" },
    });
    assert.match(said.output[0].input, /^[a-c]{2,4}$/);
  },

  async "openai, the rest"() {
    assert.deepEqual((await openai.models.list()).data.map((each) => each.id), [model]);
    const { data } = await openai.embeddings.create({ model, input: ["a", "b"] });
    assert.deepEqual(data.map((each) => each.embedding.length), [256, 256]);
    const completed = await openai.completions.create({ model, prompt: "A block is", max_tokens: 8, temperature, stream: true });
    assert.ok(await joined(completed, (chunk) => chunk.choices[0]?.text));
    const body = { model, messages: question, max_tokens: 3 };
    const line = JSON.stringify({ custom_id: "a", method: "POST", url: "/v1/chat/completions", body });
    const file = await openai.files.create({ file: await OpenAI.toFile(Buffer.from(line), "in.jsonl"), purpose: "batch" });
    let batch = await openai.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    while (!["completed", "failed"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      batch = await openai.batches.retrieve(batch.id);
    }
    const answer = JSON.parse(await (await openai.files.content(batch.output_file_id)).text());
    assert.equal(answer.response.status_code, 200);
  },

  async "anthropic"() {
    const asked = { model, max_tokens: 60, messages: question };
    const [{ text }] = (await anthropic.messages.create(asked)).content;
    const stream = anthropic.messages.stream(asked);
    let streamed = "";
    stream.on("text", (delta) => (streamed += delta));
    const { usage } = await stream.finalMessage();
    assert.equal(streamed, text);
    const counted = await anthropic.messages.countTokens({ model, messages: question });
    assert.equal(usage.input_tokens + usage.cache_read_input_tokens, counted.input_tokens);
    await assert.rejects(anthropic.messages.create({ ...asked, model: "other" }), Anthropic.NotFoundError);
    assert.equal((await anthropic.models.retrieve(model)).id, model);
  },

  async "anthropic, tools and thoughts"() {
    const own = betaZodTool({ name: "get_weather", description, inputSchema: Place, run: forecast });
    const asked = { model, max_tokens: 100, messages: weather, tools: [own], max_iterations: 3, temperature };
    assert.match((await anthropic.beta.messages.toolRunner(asked)).content[0].text, /21/);
    const sum = [{ role: "user", content: "What is 123 + 456?" }];
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const thought = await anthropic.messages.stream({ model, max_tokens: 1300, thinking, messages: sum }).finalMessage();
    assert.deepEqual(thought.content.map((block) => block.type), ["thinking", "text"]);
  },
};

// The AI SDK: every provider of it that a server like this one is used with.
const providers = {
  "openai, responses": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" })(model),
  "openai, chat": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).chat(model),
  "openai-compatible": createOpenAICompatible({
    name: "octavo", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
  })(model),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" })(model),
};
for (const [provider, served] of Object.entries(providers)) {
  checks[`ai, ${provider}`] = async () => {
    const base = { model: served, temperature, maxRetries: 0, maxOutputTokens: 200 };
    const get_weather = tool({ description, inputSchema: Place, execute: async (place) => forecast(place) });
    const { text, usage } = await generateText({ ...base, system: "You are kind.", prompt: "What is a block?" });
    assert.ok(text && usage.inputTokens && usage.outputTokens);

    const faults = [];
    const onError = ({ error }) => faults.push(error);
    const streamed = streamText({ ...base, system: "You are kind.", prompt: "What is a block?", onError });
    assert.equal(await joined(streamed.textStream, (delta) => delta), text);
    assert.equal(await streamed.finishReason, "stop");
    const called = { ...base, messages: weather, tools: { get_weather }, stopWhen: stepCountIs(3) };
    assert.match((await generateText(called)).text, /21/);
    assert.match(await joined(streamText({ ...called, onError }).textStream, (delta) => delta), /21/);

    const { object } = await generateObject({ ...base, schema: Person, prompt: record });
    const partial = streamObject({ ...base, schema: Person, prompt: record, onError });
    for await (const each of partial.partialObjectStream) assert.ok(each);
    assert.deepEqual(await partial.object, object);
    assert.deepEqual(faults, []);

    const image = [{ type: "image", image: Buffer.from("iVBORw0KGgo=", "base64") }, { type: "text", text: "What?" }];
    await assert.rejects(generateText({ ...base, messages: [{ role: "user", content: image }] }), { statusCode: 400 });
  };
}
checks["ai, the rest"] = async () => {
  const { embedding } = await embed({ model: createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).embedding(model), value: "x" });
  assert.equal(embedding.length, 256);
  const base = { prompt: "What is 123 + 456?", maxOutputTokens: 300, maxRetries: 0 };
  const octavo = { chat_template_kwargs: { enable_thinking: true } };
  const thinking = { type: "enabled", budgetTokens: 1024 };
  for (const [provider, providerOptions] of [["openai-compatible", { octavo }], ["anthropic", { anthropic: { thinking } }]]) {
    assert.ok((await generateText({ ...base, model: providers[provider], providerOptions })).reasoningText, provider);
  }
};

const faults = {};
for (const [name, check] of Object.entries(checks)) {
  faults[name] = await check().then(() => null, (error) => error.stack);
}
console.log(JSON.stringify(faults));
