// A request as a program of its own. The key is named, not shown.

const address = () => new URL("v1", document.baseURI).href;

export function asCurl(body) {
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${address()}/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $OCTAVO_API_KEY" \\
  -d '${data}'
`;
}

// Fields that the client of OpenAI does not know go into `extra_body`.
const KNOWN = new Set(["model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "stop", "tools", "tool_choice", "response_format", "logprobs",
  "top_logprobs", "reasoning_effort", "n", "logit_bias", "user"]);

export function asPython(body) {
  const { stream: _, stream_options: __, ...fields } = body;
  const extra = Object.entries(fields).filter(([name]) => !KNOWN.has(name));
  const lines = Object.entries(fields).filter(([name]) => KNOWN.has(name))
    .map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), 1)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${address()}", api_key=os.environ.get("OCTAVO_API_KEY", "none"))
answer = client.chat.completions.create(
${lines.join("\n")}
)
print(answer.choices[0].message.content)
`;
}

function python(value, depth) {
  const pad = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value); // JSON's strings are Python's, too
  const isList = Array.isArray(value);
  const items = isList ? value.map((each) => python(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  if (!items.length) return isList ? "[]" : "{}";
  const inner = items.map((item) => `${pad}    ${item},\n`).join("");
  return `${isList ? "[" : "{"}\n${inner}${pad}${isList ? "]" : "}"}`;
}
