// One message as an article: its text, what belongs to it, and what can be done with it.

import { attachmentNodes, preview } from "./attachments.js";
import { button, copyButton, el, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";
import { tokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };
const ENDS = { length: "Cut off at the limit of tokens.", content_filter: "Filtered." };

/** A message on the page. `actions`: what the buttons do, given by the conversation's view. */
export class MessageView {
  constructor({ message, branch, branches }, actions) {
    this.message = message;
    this.actions = actions;
    this.showsTokens = null; // null: as long as there are any, once the answer is complete
    this.body = new MarkdownView();
    this.reasoning = null;
    this.below = el("div", { class: "below" });
    this.content = el("div", { class: "content" });
    this.node = el("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role],
      dataset: { id: message.id } });
    this.head = el("header", {}, el("span", { class: "who" }, NAMES[message.role]),
      branches.length > 1 ? branchButtons(branch, branches, actions) : null);
    this.bar = el("footer", { class: "actions" });
    this.node.append(this.head, this.content, this.below, this.bar);
    this.show();
  }

  get isRunning() {
    return this.message.status === "running";
  }

  /** Bring the page up to the message's fields. */
  show() {
    const { message } = this;
    if (message.role === "assistant") this.showAnswer();
    else this.showGiven();
    this.showBelow();
    if (!this.isRunning || !this.bar.childElementCount) this.bar.replaceChildren(...this.buttons());
    this.node.setAttribute("aria-busy", String(this.isRunning));
  }

  showGiven() {
    const { attachments, content } = this.message;
    this.content.replaceChildren(el("p", { class: "plain" }, content),
      attachments?.length ? el("div", { class: "media" }, ...attachments.map(preview)) : "");
  }

  showAnswer() {
    const { message } = this;
    if (message.reasoning !== undefined) {
      if (!this.reasoning) {
        this.reasoning = el("p", { class: "plain" });
        this.fold = el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), this.reasoning);
        this.content.prepend(this.fold);
      }
      const shown = this.reasoning.textContent.length;
      if (message.reasoning.length > shown) this.reasoning.append(message.reasoning.slice(shown));
    }
    const showsTokens = !this.isRunning && message.tokens?.length && this.showsTokens !== false;
    if (showsTokens) {
      this.tokens ??= tokenView(message.tokens);
      this.body.node.remove();
      this.content.append(this.tokens);
    } else {
      this.tokens?.remove();
      if (this.body.node.parentNode !== this.content) this.content.append(this.body.node);
      this.body.show(message.content, !this.isRunning);
    }
  }

  showBelow() {
    const { message } = this;
    const parts = [];
    for (const call of message.tool_calls ?? []) {
      parts.push(el("div", { class: "call" }, el("p", {}, "Calls ", el("code", {}, call.name)),
        el("pre", { tabIndex: 0 }, el("code", {}, call.args))));
    }
    if (this.isRunning && !message.content && message.reasoning === undefined) {
      parts.push(el("p", { class: "note" }, message.waits ?? "Waiting for the first token …"));
    }
    if (message.status === "stopped") parts.push(el("p", { class: "note" }, "Stopped."));
    if (message.error) {
      parts.push(el("p", { class: "problem", role: "alert" }, message.error));
    } else if (ENDS[message.finish_reason]) {
      parts.push(el("p", { class: "note" }, ENDS[message.finish_reason]));
    }
    if (message.stats?.tokens) parts.push(el("p", { class: "stats" }, statsLine(message.stats)));
    if (message.role === "assistant" && message.status === "done" && message.tool_calls?.length) {
      parts.push(this.actions.hasChildren(message) ? "" : this.resultForm());
    }
    this.below.replaceChildren(...parts);
  }

  resultForm() {
    const areas = this.message.tool_calls.map((call) => el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`,
      placeholder: `Result of ${call.name}` }));
    return el("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      this.actions.sendResults(this.message, areas.map((area) => area.value));
    } }, ...areas, el("button", { type: "submit" }, "Send results"));
  }

  buttons() {
    const { message, actions } = this;
    if (this.isRunning) return [];
    const copy = copyButton(() => message.content);
    if (message.role === "user") return [button("Edit", () => this.edit()), copy];
    if (message.role === "tool") return [copy];
    const tokens = message.tokens?.length ? button("Probabilities", (event) => {
      this.showsTokens = this.showsTokens === false;
      event.target.setAttribute("aria-pressed", String(this.showsTokens));
      this.showAnswer();
    }, { "aria-pressed": String(this.showsTokens !== false) }) : null;
    return [
      message.status === "failed" ? button("Try again", () => actions.regenerate(message)) : null,
      copy,
      button("Regenerate", () => actions.regenerate(message)),
      tokens,
      copyButton(() => asCurl(actions.bodyOf(message)), "Copy as curl"),
      copyButton(() => asPython(actions.bodyOf(message)), "Copy as Python"),
    ].filter(Boolean);
  }

  edit() {
    const area = el("textarea", { class: "edit", rows: 4, value: this.message.content, "aria-label": "Edited message" });
    const close = () => {
      form.remove();
      this.content.hidden = this.bar.hidden = false;
      this.bar.querySelector("button").focus();
    };
    let attached = this.message.attachments ?? [];
    const list = el("ul", { class: "attachments", "aria-label": "Attachments of the message" });
    const showAttached = () => list.replaceChildren(...attachmentNodes(attached, (item) => {
      attached = attached.filter((each) => each !== item);
      showAttached();
      area.focus();
    }));
    showAttached();
    const send = () => { if (area.value.trim() || attached.length) this.actions.edit(this.message, area.value, attached); };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const form = el("div", { class: "edit-form" }, list, area,
      el("div", { class: "actions" }, button("Send edited", send), button("Cancel", close)));
    this.content.hidden = this.bar.hidden = true;
    this.content.after(form);
    area.focus();
  }
}

function branchButtons(branch, branches, actions) {
  const go = (step) => () => actions.choose(branches[branch + step]);
  return el("span", { class: "branches" },
    button("‹", go(-1), { label: "Previous", disabled: branch === 0 }),
    el("span", {}, `${branch + 1} of ${branches.length}`),
    button("›", go(1), { label: "Next", disabled: branch === branches.length - 1 }));
}

function statsLine({ tokens, promptTokens, ttftMs, tokensPerS }) {
  const parts = [`${tokens} tokens`];
  if (ttftMs) parts.push(`TTFT ${seconds(ttftMs)}`);
  if (tokensPerS) parts.push(`${tokensPerS.toFixed(1)} tokens/s`);
  if (promptTokens) parts.push(`prompt ${promptTokens}`);
  return parts.join(" · ");
}
