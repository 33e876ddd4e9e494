// What there is besides requests, as small tables: rejects, keys, drafts, adapters, memory, processes.

import { bytes, el } from "./dom.js";

const CAUSES = {
  context_length_exceeded: "can never fit: longer than the model's context",
  queue_full: "not now: the queue is full",
  wait_too_long: "not now: the expected wait is too long",
  rate_limit_exceeded: "not now: a key's limit",
  request_timeout: "reached its deadline",
  draining: "the server is shutting down",
  loading: "the model is being loaded",
};

export class Tables {
  constructor() {
    this.parts = new Map();
    this.node = el("div", { class: "tables" });
  }

  show(event) {
    this.put("Rejected, by cause", ["Cause", "Requests"],
      Object.entries(event.rejections).map(([cause, count]) => [CAUSES[cause] ? `${cause} (${CAUSES[cause]})` : cause, count]));
    if (event.tenants) {
      this.put("Keys", ["Key", "Running", "Waiting", "Requests", "Prompt tokens", "Output tokens", "Refused", "Share"],
        event.tenants.map((each) => [each.name, each.running, each.waiting, each.requests, each.prompt_tokens,
          each.output_tokens, each.refused, `${Math.round(100 * each.share)} %`]));
    }
    if (event.drafts) {
      this.put("Drafts", ["Position", "Verified", "Accepted"], event.drafts.proposed.map((count, at) => [at + 1, count,
        `${event.drafts.accepted[at]} (${count ? Math.round((100 * event.drafts.accepted[at]) / count) : 0} %)`]));
    }
    if (event.adapters?.length) {
      this.put("Adapters", ["Name", "Running", "Waiting", "Requests", "Loads", "Evictions"],
        event.adapters.map((each) => [each.name, each.running, each.waiting, each.requests, each.loads, each.evictions]));
    }
    if (event.models) this.put("Models loaded", ["Name"], event.models.map((name) => [name]));
    if (event.memory) {
      this.put("Memory", ["Process", "Own", "Files (weights)", "Shared"], event.memory.map((each) => [
        `${each.program} (${each.pid})`, bytes(each.anonymous ?? 0), bytes(each.files ?? 0), bytes(each.shared ?? 0)]));
    }
    if (event.num_replicas) {
      const lost = event.outages ?? {};
      this.put("Engines", ["Engine", "Ranks", "State"], Array.from({ length: event.num_replicas }, (_, at) => [
        at, event.num_ranks, lost[at] ?? "ready"]));
      this.put("Since the start", ["What", "Number"], [
        ["Restarts of an engine", event.num_deaths], ["Answers taken up or replayed", event.num_replayed],
        ...Object.entries(event.finished).map(([reason, count]) => [`Ended: ${reason}`, count]),
      ]);
    }
  }

  put(title, heads, rows) {
    let part = this.parts.get(title);
    if (!part) {
      part = { body: el("tbody"), text: null };
      this.node.append(el("section", {}, el("h2", {}, title), el("div", { class: "wide", tabIndex: 0,
        role: "region", "aria-label": title }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th",
        { scope: "col" }, head)))), part.body))));
      this.parts.set(title, part);
    }
    const text = JSON.stringify(rows);
    if (text === part.text) return;
    part.text = text;
    const shown = rows.length ? rows : [["none", ...heads.slice(1).map(() => "")]];
    part.body.replaceChildren(...shown.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, String(cell))))));
  }
}
