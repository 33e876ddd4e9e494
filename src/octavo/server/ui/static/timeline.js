// One request from its arrival to its last token: as bars on a line of time, and the same as a list.

import { el, svg, time } from "./dom.js";

const NAMES = { waiting: "queue", preempted: "preempted", prefill: "prefill", decode: "output" };
const HEIGHT = 26;
const WIDTH = 1000;

export class Timeline {
  constructor() {
    this.id = null;
    this.title = el("h3", {});
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "timeline-bars",
      "aria-hidden": "true" });
    this.list = el("ol", { class: "timeline-list" });
    this.node = el("div", { class: "timeline", hidden: true }, this.title, this.picture, this.list);
  }

  show(known, nowS) {
    this.node.hidden = !known;
    if (!known) return;
    const spans = phases(known, known.endedS ?? nowS);
    const startS = spans[0].fromS;
    const lengthS = Math.max(1e-3, spans.at(-1).toS - startS);
    const state = known.endedS ? `ended after ${time(lengthS)}` : `${known.last.status}, ${time(lengthS)} so far`;
    this.title.textContent = `${known.last.name ?? `#${known.id}`}: ${state}`;
    this.picture.replaceChildren(...spans.map(({ name, fromS, toS }) => svg("rect", {
      x: (WIDTH * (fromS - startS)) / lengthS, y: 0, height: HEIGHT, class: `phase ${name}`,
      width: Math.max(1, (WIDTH * (toS - fromS)) / lengthS),
    })));
    this.list.replaceChildren(...spans.map(({ name, fromS, toS, note }) => el("li", { class: name },
      `${name}: ${time(toS - fromS)}`, note ? el("span", {}, ` – ${note}`) : "")));
  }
}

/** Return the phases of a request, without gaps: what the frontend knows of its beginning, then what was seen. */
function phases({ last, points, arrivalS }, endS) {
  const spans = [];
  const add = (name, fromS, toS, note = "") => {
    const before = spans.at(-1);
    if (before?.name === name && name !== "prefill") Object.assign(before, { toS, note: note || before.note });
    else if (toS > fromS || note) spans.push({ name, fromS, toS, note });
  };
  const firstS = points[0][0];
  const scheduledS = last.scheduled_s ?? null;
  const tokenS = last.first_token_s ?? null;
  add("queue", arrivalS, Math.min(firstS, scheduledS ?? firstS), points[0][1] === "waiting" ? points[0][5] : "");
  if (scheduledS !== null && scheduledS < firstS) {
    add("prefill", scheduledS, Math.min(firstS, tokenS ?? firstS), last.num_cached ? `${last.num_cached} tokens cached` : "");
    if (tokenS !== null && tokenS < firstS) add("output", tokenS, firstS);
  }
  points.forEach(([atS, status, computed, numKnown, preemptions, reason], at) => {
    const toS = points[at + 1]?.[0] ?? endS;
    const note = status === "prefill" ? `chunk up to token ${computed} of ${last.num_prompt}`
      : status === "preempted" ? `${preemptions} times` : status === "waiting" ? reason
        : `${numKnown - last.num_prompt} tokens`;
    add(NAMES[status] ?? status, atS, toS, note);
  });
  return spans.length ? spans : [{ name: "queue", fromS: arrivalS, toS: endS, note: "" }];
}
