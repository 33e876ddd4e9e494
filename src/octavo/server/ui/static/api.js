// Requests to the server at the page's own address, and its errors in words.

import { askForKey, storedKey } from "./key.js";

/** An error that the page shows as it is. `code`, and `retryAfter` in seconds: where the server says so. */
export class SpokenError extends Error {
  constructor(text, { code = null, retryAfter = null } = {}) {
    super(text);
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const HINTS = {
  429: "The server is busy",
  503: "The server cannot answer now",
  413: "That is too large",
  408: "That took too long",
};

/** Fetch a path below the page's address. Asks for the key where one is needed. Raises SpokenError. */
export async function request(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...(options.headers ?? {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new SpokenError("The server cannot be reached. It may have ended, or the network is down.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey(key ? "The server does not know this key." : "This server asks for an API key.", key);
      continue;
    }
    throw await inWords(response);
  }
}

export const json = async (path, options) => (await request(path, options)).json();

async function inWords(response) {
  let message = "";
  let code = null;
  try {
    ({ message = "", code = null } = (await response.json()).error ?? {});
  } catch {
    message = `status ${response.status}`; // a proxy's page, perhaps
  }
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const hint = HINTS[response.status];
  let text = hint ? `${hint}: ${message}` : message || `The server answered with status ${response.status}.`;
  if (retryAfter) text += ` Try again in ${retryAfter} s.`;
  return new SpokenError(text, { code, retryAfter });
}

/** Yield the data of a response's server-sent events, as text, with the last event id seen. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n");
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        const id = lines.find((line) => line.startsWith("id:"));
        const said = lines.find((line) => line.startsWith(":"))?.slice(1).trim();
        if (said && said !== "ping") yield { comment: said };
        if (data.length) yield { data: data.join("\n"), id: id ? id.slice(3).trim() : null };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection is gone already
  }
}
