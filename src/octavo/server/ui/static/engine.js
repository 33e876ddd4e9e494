// The engine, live: the stream of its state, kept for a few minutes, and the parts of the page that show it.

import { events, request, SpokenError } from "./api.js";
import { byId, el, time } from "./dom.js";
import { KvMap } from "./kvmap.js";
import { countsBetween, percentile } from "./percentiles.js";
import { Plots } from "./plots.js";
import { RequestTable } from "./requests.js";
import { SettingsTable } from "./settings.js";
import { Tables } from "./tables.js";

const KEPT = 600; // events: two minutes at five a second
const WINDOW_S = 60; // of percentiles
const RATE_S = 2; // of rates

export class EngineView {
  constructor() {
    this.history = [];
    this.isOn = false;
    this.state = el("p", { id: "engine-state" }, "Not connected.");
    this.why = el("div", { id: "why", role: "status" });
    this.cards = el("dl", { id: "cards" });
    this.requests = new RequestTable();
    this.plots = new Plots();
    this.map = new KvMap();
    this.tables = new Tables();
    this.settings = new SettingsTable();
    byId("engine").append(this.state, this.why, this.cards, this.requests.node, this.plots.node, this.map.node,
      this.tables.node, this.settings.node);
  }

  about(about) {
    this.settings.show(about);
  }

  /** Show the engine of this model, where a server has several. */
  choose(model) {
    if (model === this.model) return;
    this.model = model;
    if (this.isOn) {
      this.stop();
      this.start();
    }
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    this.abortion = new AbortController();
    this.follow(this.abortion.signal);
  }

  stop() {
    if (!this.isOn) return;
    this.isOn = false;
    this.abortion.abort();
    this.state.textContent = "Not connected.";
  }

  async follow(signal) {
    while (!signal.aborted) {
      try {
        const model = this.model ? `?model=${encodeURIComponent(this.model)}` : "";
        const response = await request(`ui/engine${model}`, { signal });
        for await (const { data } of events(response)) {
          if (signal.aborted) return;
          if (!data) continue;
          const event = JSON.parse(data);
          if (event.error) throw new SpokenError(event.error.message); // the server ends, or the stream's time is over
          this.take(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.state.textContent = error.message;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  take(event) {
    this.history.push(event);
    if (this.history.length > KEPT) this.history.shift();
    this.requests.record(event);
    const point = this.point(event);
    this.plots.add(point);
    this.showState(event);
    this.showCards(event, point);
    this.requests.show(event);
    if (event.blocks) this.map.show(event.blocks, event.requests);
    this.tables.show(event);
  }

  since(event, seconds) {
    return this.history.find((each) => each.now_s >= event.now_s - seconds && each.stats) ?? event;
  }

  /** Return what plots show of this moment: rates over the last seconds, percentiles over the last minute. */
  point(event) {
    if (!event.stats) return { now_s: event.now_s };
    const before = this.since(event, RATE_S);
    const s = event.now_s - before.now_s;
    const rate = (name) => (s > 0 ? (event[name] - before[name]) / s : null);
    const stepS = event.stats.step_s_total - before.stats.step_s_total;
    const computeS = event.stats.compute_s_total - before.stats.compute_s_total;
    const minute = this.since(event, WINDOW_S);
    const of = (name, fraction) => percentile(event[name].bounds, countsBetween(minute[name], event[name]), fraction);
    return {
      now_s: event.now_s,
      prompt: rate("num_prompt_tokens"),
      output: rate("num_generation_tokens"),
      running: event.stats.num_running,
      waiting: event.requests.filter(({ status }) => status === "waiting" || status === "preempted").length,
      compute: stepS > 0 ? (100 * computeS) / stepS : null,
      host: stepS > 0 ? 100 - (100 * computeS) / stepS : null,
      ttft50: of("ttft", 0.5),
      ttft99: of("ttft", 0.99),
      gap50: of("inter_token", 0.5),
      gap99: of("inter_token", 0.99),
    };
  }

  showState(event) {
    const lost = Object.keys(event.outages ?? {}).length;
    const text = event.status !== "ready" ? `The engine is ${event.status}.`
      : lost ? `${lost} of ${event.num_replicas} engines restarting: ${Object.values(event.outages)[0]}`
        : "Connected; up to five times a second.";
    if (this.state.textContent !== text) this.state.textContent = text;
    const lines = this.requests.summary(event);
    if (this.why.textContent !== lines.join("")) this.why.replaceChildren(...lines.map((line) => el("p", {}, line)));
  }

  showCards(event, point) {
    const { stats } = event;
    if (!stats) return;
    const hits = stats.num_prefix_queries_total ? stats.num_prefix_hits_total / stats.num_prefix_queries_total : 0;
    const used = stats.num_blocks ? 1 - stats.num_free_blocks / stats.num_blocks : 0;
    const values = [
      ["Running", `${stats.num_running} of ${event.max_running ?? "?"}`],
      ["Waiting", point.waiting],
      ["Output tokens/s", round(point.output)],
      ["Prompt tokens/s", round(point.prompt)],
      ["TTFT, median · 99 %", `${time(point.ttft50)} · ${time(point.ttft99)}`],
      ["Between tokens", `${time(point.gap50)} · ${time(point.gap99)}`],
      ["KV blocks used", `${Math.round(100 * used)} %`],
      ["Prefix hits", `${Math.round(100 * hits)} %`],
      ["Preemptions", stats.num_preemptions_total],
      ["Restarts", event.num_deaths],
    ];
    this.cards.replaceChildren(...values.map(([name, value]) => el("div", {}, el("dt", {}, name),
      el("dd", {}, String(value)))));
  }
}

const round = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
