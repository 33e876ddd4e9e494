// Conversations as a file. A file is what anybody may have written: it is checked field by field.

const FORMAT = "octavo-conversations";
const MAX_TEXT = 20_000_000; // characters of one field

const isText = (value) => typeof value === "string" && value.length <= MAX_TEXT;
const isId = (value) => typeof value === "string" && /^[\w-]{1,64}$/.test(value);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const ROLES = ["user", "assistant", "tool"];
const STATUSES = ["done", "stopped", "failed"];

export function exported({ conversations, messages }) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations, messages: messages.map(settled) }, null, 1);
}

// One that is being written is exported as if it had been stopped here.
const settled = (message) => (message.status === "running" ? { ...message, status: "stopped" } : message);

/** Return the conversations and messages in a file. Raises Error, in words: what is wrong with it. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file cannot be imported: it is not JSON.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations) || !Array.isArray(data.messages)) {
    throw new Error("This file cannot be imported: it is not an export of this page.");
  }
  const conversations = data.conversations.map((one, at) => conversation(one, `conversation ${at + 1}`));
  const known = new Set(conversations.map(({ id }) => id));
  const messages = data.messages.map((one, at) => message(one, known, `message ${at + 1}`));
  const ids = new Set(messages.map(({ id }) => id));
  messages.forEach(({ parent }, at) => check(parent === null || ids.has(parent), `message ${at + 1}`, "parent"));
  return { conversations, messages };
}

function check(isRight, where, field) {
  if (!isRight) throw new Error(`This file cannot be imported: ${where} has no valid ${field}.`);
}

function conversation(one, where) {
  check(one !== null && typeof one === "object", where, "form");
  check(isId(one.id), where, "id");
  check(isText(one.title), where, "title");
  check(isNumber(one.updated), where, "time");
  const chosen = Object.entries(one.chosen ?? {}).filter((pair) => pair.every(isId));
  return {
    id: one.id, title: one.title.slice(0, 200), updated: one.updated, system: isText(one.system) ? one.system : "",
    chosen: Object.fromEntries(chosen),
  };
}

function message(one, known, where) {
  check(one !== null && typeof one === "object", where, "form");
  check(isId(one.id), where, "id");
  check(known.has(one.conversation), where, "conversation");
  check(one.parent === null || isId(one.parent), where, "parent");
  check(ROLES.includes(one.role), where, "role");
  check(isText(one.content), where, "content");
  check(isNumber(one.created), where, "time");
  const kept = {
    id: one.id, conversation: one.conversation, parent: one.parent, role: one.role, content: one.content,
    created: one.created, status: STATUSES.includes(one.status) ? one.status : "done",
  };
  for (const field of ["reasoning", "error", "finish_reason", "tool_call_id", "model"]) {
    if (isText(one[field])) kept[field] = one[field];
  }
  if (Array.isArray(one.tool_calls)) {
    kept.tool_calls = one.tool_calls.filter((call) => isText(call?.id) && isText(call.name) && isText(call.args));
  }
  if (Array.isArray(one.attachments)) {
    kept.attachments = one.attachments.filter(
      (each) => ["image", "video"].includes(each?.kind) && isText(each.name) && isText(each.url)
        && /^data:(image|video)\//.test(each.url),
    );
  }
  if (one.stats && Object.values(one.stats).every(isNumber)) kept.stats = one.stats;
  if (Array.isArray(one.tokens) && one.tokens.every(isToken)) kept.tokens = one.tokens;
  return kept;
}

const isToken = (token) => isText(token?.token) && isNumber(token.logprob) && Array.isArray(token.top)
  && token.top.every((other) => Array.isArray(other) && isText(other[0]) && isNumber(other[1]));
