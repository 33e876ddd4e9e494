// A conversation as a tree: messages with the same parent are branches, and one of them is shown.

export const ROOT = "root";

/** Return the branches of each message, oldest first, by the parent's id. */
export function branches(messages) {
  const byParent = new Map();
  for (const message of messages) {
    const parent = message.parent ?? ROOT;
    if (!byParent.has(parent)) byParent.set(parent, []);
    byParent.get(parent).push(message);
  }
  for (const each of byParent.values()) each.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  return byParent;
}

/** Return the messages that are shown, from the first to the last: the chosen branches, else the newest. */
export function shownPath(messages, chosen) {
  const byParent = branches(messages);
  const path = [];
  const seen = new Set(); // a file may contain a circle
  let at = ROOT;
  while (byParent.has(at) && !seen.has(at)) {
    seen.add(at);
    const among = byParent.get(at);
    const message = among.find((each) => each.id === chosen[at]) ?? among.at(-1);
    path.push({ message, branch: among.indexOf(message), branches: among });
    at = message.id;
  }
  return path;
}

/** Return the request's messages: the path up to `last`, earlier answers as they were, without their reasoning. */
export function wireMessages(path, system) {
  const wire = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "assistant") {
      if (!message.content && !message.tool_calls?.length) continue; // nothing came: it failed
      const calls = message.tool_calls?.map(({ id, name, args }) => ({
        id, type: "function", function: { name, arguments: args },
      }));
      wire.push({ role: "assistant", content: message.content, ...(calls?.length ? { tool_calls: calls } : {}) });
    } else if (message.role === "tool") {
      wire.push({ role: "tool", tool_call_id: message.tool_call_id, content: message.content });
    } else {
      wire.push({ role: "user", content: userContent(message) });
    }
  }
  return wire;
}

function userContent({ content, attachments }) {
  if (!attachments?.length) return content;
  const media = attachments.map(({ kind, url }) => (
    kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } }
  ));
  return [...media, { type: "text", text: content }];
}
