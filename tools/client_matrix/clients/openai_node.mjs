// The official client for Node. Prints the same line of JSON as check.py.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

const modules = dirname(dirname(process.execPath)); // .../node_modules/node/bin/node
const require = createRequire(join(modules, "..", "any.js"));
const { OpenAI, BadRequestError } = require("openai");
const [HALF, CORPUS, INSTRUCT] = JSON.parse(process.env.PACLM_CLIENT_MATRIX);
const client = new OpenAI({ baseURL: `${HALF.root}/v1`, apiKey: HALF.key, maxRetries: 0 });
const instruct = new OpenAI({ baseURL: `${INSTRUCT.root}/v1`, apiKey: INSTRUCT.key, maxRetries: 0 });
const anyKey = new OpenAI({ baseURL: `${CORPUS.root}/v1`, apiKey: "EMPTY", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the patient?" }];
const prompt = "The patient said";
const ask = { model: HALF.model, max_tokens: 8 };
const structured = { model: INSTRUCT.model, max_tokens: 64, temperature: 0 };
const letter = "Anna Berg is 54 years old and comes with a cough. Write her name and age as JSON.";
const properties = { name: { type: "string", maxLength: 24 }, age: { type: "integer" } };
const schema = { type: "object", properties, required: ["name", "age"], additionalProperties: false };
const personFormat = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
const city = { type: "object", properties: { city: { type: "string", maxLength: 24 } }, required: ["city"] };
const parameters = { ...city, additionalProperties: false };
const weather = { name: "weather", description: "The weather in a city.", parameters };
const weatherQuestion = [{ role: "user", content: "What is the weather in Rome?" }];
const stop = [...Array.from({ length: 11 }, (_, number) => `### ${number}`), ..."aeiou"];
const once = () => ({ headers: { "Idempotency-Key": randomUUID() } });

function expect(claim, said = "") {
  if (!claim) throw new Error(`expectation failed: ${JSON.stringify(said)}`);
}

async function chargedTokens(server) {
  const headers = { authorization: `Bearer ${server.admin}` };
  return (await (await fetch(`${server.root}/v1/admin/overview`, { headers })).json()).tokens.charged;
}

async function charged(work, server = HALF) {
  const before = await chargedTokens(server);
  const result = await work();
  return [result, (await chargedTokens(server)) - before];
}

async function refused(work) {
  const [error, cost] = await charged(() => work().then(() => null, (error) => error));
  expect(error instanceof BadRequestError && cost === 0, String(error));
  return error;
}

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const CHECKS = {
  async models() {
    const { data } = await client.models.list();
    expect(data.map((model) => model.id).join() === HALF.model);
  },
  async completion() {
    const [answer, cost] = await charged(() => client.completions.create({ ...ask, prompt }));
    expect(answer.usage.completion_tokens === cost && cost > 0, cost);
  },
  async chat() {
    const [answer, cost] = await charged(() => client.chat.completions.create({ ...ask, messages }));
    expect(answer.usage.completion_tokens === cost && cost > 0, cost);
  },
  async multi_turn() {
    const { message } = (await client.chat.completions.create({ ...ask, messages })).choices[0];
    const answer = await client.chat.completions.create({ ...ask, messages: [...messages, message, ...messages] });
    expect(answer.choices[0].message.role === "assistant");
  },
  async stream() {
    const events = await all(await client.chat.completions.create({ ...ask, messages, stream: true }));
    expect(["length", "stop"].includes(events.at(-1).choices[0].finish_reason), events.at(-1));
  },
  async stream_usage() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const work = async () => all(await client.chat.completions.create({ ...ask, ...options, messages }));
    const [events, cost] = await charged(work);
    expect(events.at(-1).usage.completion_tokens === cost && cost > 0, cost);
  },
  async stop() {
    const answer = await client.chat.completions.create({ ...ask, max_tokens: 64, messages, stop });
    const [choice] = answer.choices;
    expect(choice.finish_reason === "stop" && !/[aeiou]/.test(choice.message.content), choice);
  },
  async n() {
    const [answer, cost] = await charged(() => client.chat.completions.create({ ...ask, messages, n: 2 }));
    expect(answer.choices.length === 2 && answer.usage.completion_tokens === cost, cost);
  },
  async seed() {
    expect((await client.chat.completions.create({ ...ask, messages, seed: 7 })).choices.length === 1);
  },
  async context() {
    const long = "the patient has a cough ".repeat(400);
    const error = await refused(() => client.completions.create({ ...ask, prompt: long }));
    expect(error.code === "context_length_exceeded", error);
  },
  async json_schema() {
    const body = { ...structured, messages: [{ role: "user", content: letter }], response_format: personFormat };
    const fits = (found) => typeof found.name === "string" && Number.isInteger(found.age);
    const [answer, cost] = await charged(() => instruct.chat.completions.parse(body), INSTRUCT);
    expect(fits(JSON.parse(answer.choices[0].message.content)), answer.choices);
    expect(answer.usage.completion_tokens === cost && cost > 0, cost);
    const final = await instruct.chat.completions.stream(body).finalContent();
    expect(fits(JSON.parse(final)), final);
  },
  async json_object() {
    const body = { ...structured, max_tokens: 200, messages: [{ role: "user", content: letter }] };
    const answer = await instruct.chat.completions.create({ ...body, response_format: { type: "json_object" } });
    expect(typeof JSON.parse(answer.choices[0].message.content) === "object", answer.choices);
  },
  async tools() {
    const tools = [{ type: "function", function: weather }];
    const body = { ...structured, messages: weatherQuestion, tools, tool_choice: "required" };
    const { message } = (await instruct.chat.completions.create(body)).choices[0];
    const [call] = message.tool_calls;
    expect("city" in JSON.parse(call.function.arguments) && message.tool_calls.length === 1, message);
    const streamed = await instruct.chat.completions.stream(body).finalMessage();
    expect("city" in JSON.parse(streamed.tool_calls[0].function.arguments), streamed);
    const turns = [...weatherQuestion, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    const answer = await instruct.chat.completions.create({ ...body, messages: turns, tool_choice: "none" });
    expect(answer.choices[0].message.content, answer.choices);
  },
  async agent() {
    const asked = [];
    const run = (given) => (asked.push(given.city), "sunny, 24 degrees");
    const tool = { type: "function", function: { ...weather, function: run, parse: JSON.parse } };
    const named = { type: "function", function: { name: "weather" } };
    const body = { ...structured, messages: weatherQuestion, tools: [tool], tool_choice: named };
    const runner = instruct.chat.completions.runTools(body); // ends after a call of the tool that is named
    await runner.done();
    expect(asked.length === 1 && runner.messages.at(-1).role === "tool", runner.messages);
  },
  async structured_outputs() {
    const form = { structured_outputs: { regex: "[0-9]{4}-[0-9]{2}" } };
    const answer = await instruct.chat.completions.create({ ...structured, messages, ...form });
    expect(/^[0-9]{4}-[0-9]{2}$/.test(answer.choices[0].message.content), answer.choices);
  },
  async forced_choice() {
    const yesNo = { type: "object", properties: { is_ill: { enum: ["yes", "no"] } }, required: ["is_ill"] };
    const format = { name: "choice", schema: { ...yesNo, additionalProperties: false } };
    const more = { messages, response_format: { type: "json_schema", json_schema: format } };
    const error = await refused(() => client.chat.completions.create({ ...ask, ...more }));
    expect(error.code === "forced_choice", error);
    const answer = await instruct.chat.completions.create({ ...structured, ...more });
    expect(["yes", "no"].includes(JSON.parse(answer.choices[0].message.content).is_ill), answer.choices);
    return "400";
  },
  async refusal() {
    const image = [{ type: "image_url", image_url: { url: "data:image/png;base64,AA==" } }];
    for (const more of [{ messages: [{ role: "user", content: image }] }, { messages, top_p: 0.5 }]) {
      expect((await refused(() => client.chat.completions.create({ ...ask, ...more }))).param);
    }
    return "400";
  },
  async logprobs() {
    const more = { model: CORPUS.model, max_tokens: 4, logprobs: true, top_logprobs: 2 };
    const answer = await anyKey.chat.completions.create({ ...more, messages });
    expect(answer.choices[0].logprobs.content.every((entry) => entry.logprob <= 0));
  },
  async idempotency() {
    const header = once();
    const work = async () => [
      await client.chat.completions.create({ ...ask, messages }, header),
      await client.chat.completions.create({ ...ask, messages }, header),
    ];
    const [[first, again], cost] = await charged(work);
    expect(first.id === again.id && first.usage.completion_tokens === cost, cost);
  },
  async lost_answer() {
    const options = { apiKey: HALF.key, maxRetries: 3, timeout: 4000 };
    const patient = new OpenAI({ baseURL: `${HALF.slow_root}/v1`, ...options });
    const started = Date.now();
    const [answer, cost] = await charged(() => patient.chat.completions.create({ ...ask, messages }, once()));
    expect(Date.now() - started >= 4000, "no answer was lost");
    expect(answer.usage.completion_tokens === cost && cost > 0, cost);
  },
  async privacy_body() {
    const answer = await client.chat.completions.create({ ...ask, messages });
    expect(answer.privacy.charged_nats > 0 && answer.privacy.mia_bound < 1, answer.privacy);
  },
  async privacy_headers() {
    const { data, response } = await client.chat.completions.create({ ...ask, messages }).withResponse();
    expect(Number(response.headers.get("paclm-charged-nats")) === data.privacy.charged_nats);
    expect(Number(response.headers.get("paclm-mia-bound")) === data.privacy.mia_bound);
  },
  async responses() {
    const input = { model: HALF.model, input: prompt, max_output_tokens: 16, store: false };
    const [answer, cost] = await charged(() => client.responses.create(input));
    expect(answer.output_text && answer.usage.output_tokens === cost && cost > 0, cost);
    const [events, again] = await charged(async () => all(await client.responses.create({ ...input, stream: true })));
    expect(["response.completed", "response.incomplete"].includes(events.at(-1).type), events.at(-1).type);
    expect(events.at(-1).response.usage.output_tokens === again, again);
  },
  async responses_structured() {
    const input = { model: INSTRUCT.model, max_output_tokens: 64, temperature: 0, store: false };
    const text = { format: { type: "json_schema", name: "person", schema, strict: true } };
    const answer = await instruct.responses.parse({ ...input, input: letter, text });
    expect(Number.isInteger(JSON.parse(answer.output_text).age), answer.output);
    const more = { tools: [{ type: "function", strict: true, ...weather }], tool_choice: "required" };
    const { output } = await instruct.responses.create({ ...input, ...more, input: weatherQuestion });
    expect("city" in JSON.parse(output[0].arguments), output);
    const result = { type: "function_call_output", call_id: output[0].call_id, output: "sunny" };
    const turns = [...weatherQuestion, ...output, result];
    const last = await instruct.responses.create({ ...input, ...more, input: turns, tool_choice: "none" });
    expect(last.output_text, last.output);
  },
  async empty_key() {
    expect((await anyKey.completions.create({ model: CORPUS.model, prompt, max_tokens: 4 })).choices.length === 1);
  },
  async async() {
    const work = () => Promise.all([1, 2, 3, 4].map(() => client.chat.completions.create({ ...ask, messages })));
    const [answers, cost] = await charged(work);
    expect(answers.reduce((sum, answer) => sum + answer.usage.completion_tokens, 0) === cost, cost);
  },
};

const cells = {};
for (const [name, check] of Object.entries(CHECKS)) {
  try {
    const code = await check();
    cells[name] = code ? { outcome: "refused", code } : { outcome: "ok" };
  } catch (error) {
    console.error(error);
    cells[name] = { outcome: "failed", error: `${error}`.slice(0, 600) };
  }
}
const { version } = JSON.parse(readFileSync(join(modules, "..", "openai", "package.json")));
console.log(JSON.stringify({ version: `openai ${version}, node ${process.versions.node}`, cells }));
