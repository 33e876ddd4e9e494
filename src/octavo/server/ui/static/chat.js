// The chat: one conversation on the page, and the answers that are being computed, in this conversation or another.

import { Answer } from "./answer.js";
import { Attachments } from "./attachments.js";
import { announce, byId, el, newId } from "./dom.js";
import { MessageView } from "./messages.js";
import { CUT_OFF, rescue } from "./rescue.js";
import { ROOT, shownPath, wireMessages } from "./tree.js";

const SAVE_MS = 2000; // between two saves of an answer that grows
const ABANDONED_MS = 15_000; // a running answer that no tab has saved for so long was cut off: the browser has crashed
const FRAME_MS = 50; // least between two views of an answer that grows
const TITLE = 60;
export const OPEN = "octavo-open"; // in session storage: each tab has its own

export class Chat {
  constructor(store, parameters, sidebar) {
    this.store = store;
    this.parameters = parameters;
    this.sidebar = sidebar;
    this.conversation = null;
    this.messages = new Map();
    this.views = new Map();
    this.answers = new Map(); // by the message's id, those that are being computed
    this.attachments = new Attachments((text) => this.say(text));
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.input = byId("message");
    this.system = byId("system");
    this.actions = {
      regenerate: (message) => this.regenerate(message),
      edit: (message, text, attachments) => this.ask(text, message.parent, attachments),
      choose: (message) => this.choose(message),
      bodyOf: (message) => this.body(this.pathTo(message.parent)),
      sendResults: (message, results) => this.sendResults(message, results),
      hasChildren: (message) => [...this.messages.values()].some((each) => each.parent === message.id),
    };
    this.connect();
  }

  connect() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("input", () => this.fitInput());
    byId("stop").addEventListener("click", () => {
      this.running()?.stop();
      this.input.focus();
    });
    this.system.addEventListener("change", () => {
      if (!this.conversation) return;
      this.conversation.system = this.system.value;
      this.keep();
    });
    addEventListener("pagehide", () => rescue([...this.answers.values()].map(({ message }) => message)));
  }

  /** Show a conversation; null: a new one, which is kept with its first message. */
  async open(id) {
    this.conversation = id ? await this.store.conversation(id) : null;
    this.system.value = this.conversation?.system ?? "";
    this.say("");
    await this.reload();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.input.focus();
  }

  /** Read the conversation's messages again: another tab may have added some. */
  async reload() {
    const id = this.conversation?.id;
    const stored = id ? await this.store.messages(id) : [];
    if (id !== this.conversation?.id) return; // another one was opened meanwhile
    this.messages = new Map(stored.map((message) => [message.id, message]));
    for (const { message } of this.answers.values()) {
      if (message.conversation === id) this.messages.set(message.id, message);
    }
    for (const message of this.messages.values()) {
      if (message.status !== "running" || this.answers.has(message.id)) continue;
      const leftMs = message.saved + ABANDONED_MS - Date.now();
      if (leftMs <= 0) Object.assign(message, { status: "failed", error: CUT_OFF });
      else setTimeout(() => this.lookAgain(message), leftMs + 1);
    }
    this.show();
  }

  /** Another tab's answer may have been saved meanwhile, or is cut off. */
  lookAgain(message) {
    if (this.messages.get(message.id) === message && !this.isEditing) this.reload();
  }

  /** Whether a message is being edited: what is being written is not taken away. */
  get isEditing() {
    return Boolean(this.log.querySelector(".edit-form"));
  }

  show() {
    const path = this.path();
    this.views = new Map(path.map((place) => [place.message.id, new MessageView(place, this.actions)]));
    // A live region: what is added is read aloud, answers when they are complete (`aria-busy`); not all of it anew.
    this.log.setAttribute("aria-live", "off");
    this.log.replaceChildren(...[...this.views.values()].map((view) => view.node));
    setTimeout(() => this.log.setAttribute("aria-live", "polite"));
    byId("welcome").hidden = path.length > 0;
    this.showControls();
  }

  showControls() {
    const isRunning = Boolean(this.running());
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    this.sidebar.mark(this.conversation?.id ?? null);
    sessionStorage.setItem(OPEN, this.conversation?.id ?? ""); // where a reload goes on
  }

  path() {
    return shownPath([...this.messages.values()], this.conversation?.chosen ?? {});
  }

  pathTo(id) {
    const path = [];
    for (let at = this.messages.get(id); at; at = this.messages.get(at.parent)) path.unshift(at);
    return path;
  }

  /** The answer that is being computed in what is shown. */
  running() {
    return this.path().map(({ message }) => this.answers.get(message.id)).find(Boolean);
  }

  say(text) {
    const line = byId("problem");
    line.textContent = text;
    line.hidden = !text;
  }

  send() {
    const text = this.input.value;
    if (this.running()) {
      this.say("An answer is being written. Stop it, or wait for its end.");
      return;
    }
    if (!text.trim() && !this.attachments.items.length) return;
    const last = this.path().at(-1)?.message;
    if (last?.status === "running") {
      this.say("Another tab is having this answered.");
      return;
    }
    if (this.ask(text, last?.id ?? null, this.attachments.items)) {
      this.attachments.take();
      this.input.value = "";
      this.fitInput();
    }
  }

  /** Add a question after `parent`, and have it answered. Returns whether that was possible. */
  ask(text, parent, attachments) {
    const fields = this.fields();
    if (!fields) return false;
    if (!this.conversation) {
      const title = text.trim().replace(/\s+/g, " ").slice(0, TITLE) || attachments[0]?.name || "Conversation";
      this.conversation = { id: newId(), title, system: this.system.value, chosen: {}, updated: Date.now() };
    }
    const question = this.add({ role: "user", parent, content: text, status: "done",
      ...(attachments.length ? { attachments } : {}) });
    this.answer(question.id, fields, [question]);
    return true;
  }

  regenerate(message) {
    const fields = this.fields();
    if (fields) this.answer(message.parent, fields, []);
  }

  sendResults(message, results) {
    const fields = this.fields();
    if (!fields) return;
    const added = [];
    let parent = message.id;
    for (const [at, { id }] of message.tool_calls.entries()) {
      const result = this.add({ role: "tool", parent, content: results[at], tool_call_id: id, status: "done" });
      added.push(result);
      parent = result.id;
    }
    this.answer(parent, fields, added);
  }

  /** Return what the parameters add to a request; null if one of them is wrong, which is said. */
  fields() {
    try {
      const fields = this.parameters.fields();
      this.say("");
      return fields;
    } catch (error) {
      this.say(error.message);
      return null;
    }
  }

  body(path, fields = this.fields() ?? {}) {
    const messages = wireMessages(path, this.system.value);
    return { ...fields, messages, stream: true, stream_options: { include_usage: true } };
  }

  add(fields) {
    const message = { id: newId(), conversation: this.conversation.id, created: Date.now(), saved: Date.now(), ...fields };
    this.messages.set(message.id, message);
    this.conversation.chosen[message.parent ?? ROOT] = message.id;
    return message;
  }

  /** Have the server answer the messages up to `parent`; `added` are those of them that are new. */
  async answer(parent, fields, added) {
    const { conversation } = this;
    const message = this.add({ role: "assistant", parent, content: "", status: "running" });
    const answer = new Answer(message, this.body(this.pathTo(parent), fields), () => this.onChange(answer));
    this.answers.set(message.id, answer);
    this.show();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    announce("Waiting for the answer");
    conversation.updated = Date.now();
    await this.keep([...added, message]);
    await answer.run();
    this.answers.delete(message.id);
    delete message.numPieces;
    delete message.waits;
    this.views.get(message.id)?.show();
    this.showControls();
    announce(message.status === "done" ? "The answer is complete." : "");
    await this.save(message);
  }

  /** An answer has grown: show it soon, and save it from time to time. */
  onChange(answer) {
    answer.dueMs ??= 0;
    if (answer.timer) return;
    answer.timer = setTimeout(() => {
      answer.timer = null;
      const { message } = answer;
      const isAtEnd = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 80;
      const startMs = performance.now();
      if (this.answers.has(message.id)) this.views.get(message.id)?.show();
      if (isAtEnd && this.views.has(message.id)) this.scroller.scrollTop = this.scroller.scrollHeight;
      // A long answer takes longer to show: leave the keyboard three quarters of the time.
      answer.dueMs = Math.max(FRAME_MS, 4 * (performance.now() - startMs));
      if (Date.now() - message.saved > SAVE_MS) this.save(message);
    }, answer.dueMs);
  }

  async save(message) {
    message.saved = Date.now();
    const { numPieces: _, ...kept } = message;
    await this.keep([message.status === "running" ? { ...kept, tokens: undefined } : kept], message.conversation);
  }

  /** Keep messages, and the conversation on the page. */
  async keep(messages = [], id = this.conversation?.id) {
    try {
      await this.store.put(id === this.conversation?.id ? this.conversation : null, messages);
      if (id === this.conversation?.id) this.sidebar.update(this.conversation);
    } catch (error) {
      this.say(`This browser does not keep the conversation: ${error?.message ?? error}`);
    }
  }

  async choose(message) {
    this.conversation.chosen[message.parent ?? ROOT] = message.id;
    this.show();
    const view = this.views.get(message.id);
    (view.node.querySelector(".branches button:not(:disabled)") ?? this.input).focus();
    await this.keep();
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, innerHeight / 3)}px`;
  }
}

/** The list of conversations, and their file. */
export class Sidebar {
  constructor(store, transfer) {
    this.store = store;
    this.list = byId("conversations");
    this.onOpen = () => {};
    byId("new-chat").addEventListener("click", () => this.onOpen(null));
    byId("export").addEventListener("click", () => transfer.save());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => {
      transfer.load(event.target.files[0]);
      event.target.value = "";
    });
  }

  async reload() {
    this.all = await this.store.conversations();
    this.show();
  }

  mark(id) {
    this.current = id;
    for (const node of this.list.querySelectorAll("button[data-id]")) {
      if (node.dataset.id === id) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
  }

  update(conversation) {
    if (!conversation) return;
    this.all = [conversation, ...(this.all ?? []).filter(({ id }) => id !== conversation.id)];
    this.show();
  }

  show() {
    const shown = JSON.stringify(this.all.map(({ id, title }) => [id, title]));
    if (shown === this.shown) return; // or the keyboard would lose its place
    this.shown = shown;
    this.list.replaceChildren(...this.all.map(({ id, title }) => el("li", {},
      el("button", { type: "button", dataset: { id }, onclick: () => this.onOpen(id) }, title),
      el("button", { type: "button", class: "quiet", "aria-label": `Delete ${title}`, onclick: () => this.remove(id, title) },
        "×"))));
    this.mark(this.current);
  }

  async remove(id, title) {
    if (!confirm(`Delete “${title}”?`)) return;
    await this.store.remove(id);
    await this.reload();
    if (this.current === id) this.onOpen(null);
  }
}
