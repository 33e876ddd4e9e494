// One answer that is being computed: from the request to the last token, into a message's fields.

import { events, json, request, SpokenError } from "./api.js";

const COMPLETIONS = "v1/chat/completions";
const BUSY_MS = 30;
const SHORTEST_MS = 20; // that a rate is made of: tokens that came together say nothing

/** Fills `message` while the server answers; `onChange()` is called when there is something new. */
export class Answer {
  constructor(message, body, onChange) {
    this.message = message;
    this.body = body;
    this.onChange = onChange;
    this.abortion = new AbortController();
    this.streamId = null; // of a stream that would go on without us
    this.tokensAt = { first: 0, last: 0 };
  }

  /** Run to the end. Never throws: what went wrong is in the message. */
  async run() {
    const { message } = this;
    const startMs = performance.now();
    try {
      const response = await request(COMPLETIONS, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(this.body),
        signal: this.abortion.signal,
      });
      await this.read(response, startMs);
      message.status = "done";
    } catch (error) {
      if (this.abortion.signal.aborted) {
        message.status = "stopped";
      } else {
        message.status = "failed";
        const isOurs = error instanceof SpokenError;
        message.error = isOurs ? error.message : "The connection broke before the answer was complete.";
      }
    }
    this.onChange();
  }

  /** Stop the answer, in the engine too; the text so far stays. */
  stop() {
    this.abortion.abort();
    if (this.streamId) { // with --resume-s, leaving alone does not end it
      json(`v1/streams/${encodeURIComponent(this.streamId)}`, { method: "DELETE" }).catch(() => {}); // it has ended
    }
  }

  async read(response, startMs) {
    const { message } = this;
    let isComplete = false;
    let pausedMs = performance.now();
    for await (const { data, id, comment } of events(response)) {
      if (comment) { // why it has to wait: the model is being loaded, for instance
        message.waits = comment;
        this.onChange();
        continue;
      }
      if (id) this.streamId = id.split(":")[0];
      if (data === "[DONE]") {
        isComplete = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new SpokenError(`The answer broke off: ${chunk.error.message}`);
      this.add(chunk, startMs);
      if (performance.now() - pausedMs > BUSY_MS) { // many have come at once: let the keyboard in
        await new Promise((resolve) => setTimeout(resolve));
        pausedMs = performance.now();
      }
    }
    if (!isComplete && !message.finish_reason) {
      throw new SpokenError("The connection broke before the answer was complete.");
    }
  }

  add(chunk, startMs) {
    const { message } = this;
    message.model ??= chunk.model;
    const choice = chunk.choices?.[0];
    if (choice) {
      const { delta } = choice;
      const reasoning = delta.reasoning_content ?? delta.reasoning;
      if (delta.content) message.content += delta.content;
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      for (const call of delta.tool_calls ?? []) this.addCall(call);
      for (const row of choice.logprobs?.content ?? []) {
        (message.tokens ??= []).push({
          token: row.token, logprob: row.logprob, top: row.top_logprobs.map((one) => [one.token, one.logprob]),
        });
      }
      if (delta.content || reasoning || delta.tool_calls) {
        this.tokensAt.last = performance.now();
        this.tokensAt.first ||= this.tokensAt.last;
        message.numPieces = (message.numPieces ?? 0) + 1;
      }
      if (choice.finish_reason) message.finish_reason = choice.finish_reason;
    }
    if (chunk.usage || this.tokensAt.first) message.stats = this.stats(chunk.usage, startMs);
    this.onChange();
  }

  stats(usage, startMs) {
    const { first, last } = this.tokensAt;
    const known = this.message.stats ?? {};
    const tokens = usage?.completion_tokens ?? this.message.numPieces ?? 0;
    const stats = { ...known, tokens, ttftMs: first ? first - startMs : 0 };
    if (usage) stats.promptTokens = usage.prompt_tokens;
    if (last - first >= SHORTEST_MS && tokens > 1) stats.tokensPerS = ((tokens - 1) * 1000) / (last - first);
    return stats;
  }

  addCall({ index, id, function: part }) {
    const calls = (this.message.tool_calls ??= []);
    calls[index] ??= { id: "", name: "", args: "" };
    if (id) calls[index].id = id;
    if (part?.name) calls[index].name += part.name;
    if (part?.arguments) calls[index].args += part.arguments;
  }
}
