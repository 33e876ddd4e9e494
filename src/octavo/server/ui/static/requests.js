// The table of requests: what each does, and why it waits. A click opens its timeline.

import { el, time } from "./dom.js";
import { Timeline } from "./timeline.js";

const KEPT_ENDED = 40; // requests that have ended and whose timelines are kept
const SHOWN_ENDED = 10; // of those, the last ones, below the others
const MAX_ROWS = 200;
const WAITING = ["waiting", "preempted"];

/** What a person is told about a reason: in a line, and as a sentence about several. */
const REASONS = {
  "long prompt": (r) => ["Long prompt before it", r.num_ahead ? `${r.num_ahead} more before it` : ""],
  "next step": () => ["The next step", ""],
  rows: (r) => ["All rows are taken", r.num_ahead ? `${r.num_ahead} before it` : "next"],
  blocks: (r) => ["No free KV blocks", `needs ${r.num_blocks_needed}`],
  grammar: () => ["Its grammar is compiling", ""],
  adapter: () => ["Its adapter is loading, or others have the slots", ""],
  "prefix on disk": () => ["KV blocks are read from disk", ""],
  encoder: () => ["The images' encoder", ""],
  restart: () => ["The engine restarts; it goes on then", ""],
  "fair share": (r) => [`Fair share: ${r.tenant ?? "its key"} has more than others`,
    r.num_ahead ? `${r.num_ahead} of this key before it` : ""],
  "tenant limit": (r) => [`The limit of ${r.tenant ?? "its key"} at once`, ""],
};

const isWaiting = ({ status }) => WAITING.includes(status);
const why = (request) => (REASONS[request.reason] ?? (() => [request.reason ?? "", ""]))(request);

export class RequestTable {
  constructor() {
    this.seen = new Map(); // by id: what is known of each request, for timelines
    this.timeline = new Timeline();
    this.body = el("tbody");
    this.rows = new Map();
    this.more = el("p", { class: "hint" });
    this.empty = el("p", { class: "hint" }, "No requests.");
    const heads = ["Request", "State", "Why it waits", "Expected wait", "Waited", "Key", "Prompt", "Output", "Blocks"];
    this.node = el("section", {}, el("h2", {}, "Requests"),
      el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Requests" },
        el("table", { class: "requests" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" },
          head)))), this.body)),
      this.empty, this.more, this.timeline.node);
  }

  /** Remember how far each request is, and which have ended. */
  record(event) {
    const now = new Set();
    for (const request of event.requests) {
      const id = request.id ?? request.name;
      now.add(id);
      if (request.id && this.seen.has(request.name)) this.rename(request.name, id);
      const known = this.seen.get(id) ?? { id, points: [], arrivalS: request.arrival_s, waits: new Map() };
      if (request.reason) {
        const of = known.waits.get(request.reason) ?? { s: 0, request };
        known.waits.set(request.reason, { s: of.s + event.now_s - (known.atS ?? request.arrival_s), request });
      }
      known.atS = event.now_s;
      known.last = request;
      known.endedS = null;
      const { points } = known;
      const point = [event.now_s, request.status, request.num_computed ?? 0, request.num_known ?? 0,
        request.num_preemptions ?? 0, request.reason ?? ""];
      if (!points.length || point.slice(1).some((value, at) => value !== points.at(-1)[at + 1])) points.push(point);
      if (points.length > 2000) points.splice(1, 1000);
      this.seen.set(id, known);
    }
    const ended = [];
    for (const known of this.seen.values()) {
      if (now.has(known.id)) continue;
      known.endedS ??= event.now_s;
      ended.push(known);
    }
    for (const { id } of ended.slice(0, Math.max(0, ended.length - KEPT_ENDED))) {
      if (id !== this.timeline.id) this.seen.delete(id);
    }
  }

  /** A request that waited for its key's turn is in the engine now, where it has a number. */
  rename(name, id) {
    const known = this.seen.get(name);
    this.seen.delete(name);
    if (this.seen.has(id)) return;
    this.seen.set(id, { ...known, id });
    if (this.timeline.id === name) this.timeline.id = id;
  }

  /** Sentences for somebody who asks why a request is slow. */
  summary(event) {
    const counts = new Map();
    for (const request of event.requests.filter((each) => isWaiting(each) || each.reason)) {
      const [text] = why(request);
      counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    const lines = [...counts].map(([text, count]) => `${count} ${count === 1 ? "request waits" : "requests wait"}: ${text}.`);
    return lines.length ? lines : [event.requests.length ? "Nothing waits." : "The engine is idle."];
  }

  show(event) {
    const present = [...event.requests].sort((a, b) => isWaiting(b) - isWaiting(a)).slice(0, MAX_ROWS);
    const shown = [...present, ...this.ended()];
    const ids = new Set(shown.map((request) => request.id ?? request.name));
    for (const [id, row] of this.rows) {
      if (!ids.has(id)) {
        row.remove();
        this.rows.delete(id);
      }
    }
    shown.forEach((request, at) => {
      const row = this.row(request.id ?? request.name);
      this.fill(row, request, event.now_s);
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
    });
    this.empty.hidden = shown.length > 0;
    const left = event.requests.length - present.length;
    this.more.textContent = left > 0 ? `${left} more.` : "";
    this.timeline.show(this.seen.get(this.timeline.id), event.now_s);
  }

  /** The requests that ended last, as rows: who was slow a moment ago can be asked, too. */
  ended() {
    const all = [...this.seen.values()].filter(({ endedS }) => endedS).sort((a, b) => b.endedS - a.endedS);
    return all.slice(0, SHOWN_ENDED).map(({ last, waits }) => {
      const longest = [...waits.values()].sort((a, b) => b.s - a.s)[0];
      return { ...last, status: "ended", reason: null, waitedFor: longest ? `${why(longest.request)[0]}: ${time(longest.s)}` : "" };
    });
  }

  row(id) {
    let row = this.rows.get(id);
    if (!row) {
      const open = el("button", { type: "button", onclick: () => {
        this.timeline.id = this.timeline.id === id ? null : id;
        this.timeline.show(this.seen.get(this.timeline.id), Date.now() / 1000);
      } });
      row = el("tr", {}, el("td", {}, open), ...Array.from({ length: 8 }, () => el("td")));
      this.rows.set(id, row);
    }
    return row;
  }

  fill(row, request, nowS) {
    const [reason, more] = request.reason ? why(request) : [request.waitedFor ?? "", ""];
    const waits = isWaiting(request);
    const endS = waits ? nowS : request.scheduled_s ?? null;
    const adapter = request.adapter ? ` · ${request.adapter}` : "";
    const atMost = ["rows", "blocks"].includes(request.reason) ? "at most " : "about ";
    const values = [
      null, request.status + adapter, more ? `${reason} (${more})` : reason,
      request.reason ? (request.wait_s === null || request.wait_s === undefined ? "not known" : atMost + time(request.wait_s)) : "",
      endS === null ? "" : time(Math.max(0, endS - request.arrival_s)), request.tenant ?? "–",
      request.status === "prefill" ? `${request.num_computed} of ${request.num_prompt}` : String(request.num_prompt ?? "–"),
      waits && !request.num_preemptions ? "" : `${Math.max(0, request.num_known - request.num_prompt)}`,
      request.num_blocks === undefined ? "" : String(request.num_blocks),
    ];
    values.forEach((value, at) => {
      const cell = row.children[at];
      if (value !== null && cell.textContent !== value) cell.textContent = value;
    });
    const open = row.firstChild.firstChild;
    const name = request.name ?? `#${request.id}`;
    if (open.textContent !== name) open.textContent = name;
    open.setAttribute("aria-expanded", String(this.timeline.id === (request.id ?? request.name)));
    row.className = waits ? "waits" : request.status === "ended" ? "ended" : "";
  }
}
