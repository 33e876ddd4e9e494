// Small plots over the last two minutes, each with its values in words.

import { el, svg, time } from "./dom.js";

const KEPT = 600;
const WIDTH = 300;
const HEIGHT = 80;
const SPAN_S = 120;
const SHORTEST_S = 20; // that a plot spans, when it has just begun
const rate = (value) => `${value.toFixed(value < 10 ? 1 : 0)}/s`;
const PLOTS = [
  ["Tokens per second", [["output", "output"], ["prompt", "prompt"]], rate],
  ["Requests", [["running", "running"], ["waiting", "waiting"]], (value) => String(value)],
  ["Step time by part", [["compute", "computing"], ["host", "host"]], (value) => `${value.toFixed(0)} %`],
  ["Time to first token", [["ttft50", "median"], ["ttft99", "99 %"]], time],
  ["Between two tokens", [["gap50", "median"], ["gap99", "99 %"]], time],
];

export class Plots {
  constructor() {
    this.points = [];
    this.figures = PLOTS.map(([title, lines, format]) => {
      const paths = lines.map((_, at) => svg("path", { class: `line line-${at}`, fill: "none",
        "vector-effect": "non-scaling-stroke" }));
      const values = lines.map(([, name], at) => el("span", { class: `key key-${at}` }, name));
      const top = el("span", { class: "top" });
      const node = el("figure", {}, el("figcaption", {}, el("span", {}, title), top),
        svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...paths),
        el("p", { class: "keys" }, ...values));
      return { node, paths, values, top, lines, format };
    });
    this.node = el("section", { "aria-label": "Plots", class: "plots" }, ...this.figures.map(({ node }) => node));
  }

  add(point) {
    this.points.push(point);
    if (this.points.length > KEPT) this.points.shift();
    for (const figure of this.figures) this.draw(figure, point.now_s);
  }

  draw({ paths, values, top, lines, format }, nowS) {
    const points = this.points.filter((each) => each.now_s > nowS - SPAN_S);
    const spanS = Math.max(SHORTEST_S, nowS - points[0].now_s);
    const all = lines.flatMap(([field]) => points.map((each) => each[field]).filter(Number.isFinite));
    const highest = Math.max(...all, 0);
    top.textContent = highest ? `up to ${format(highest)}` : "";
    lines.forEach(([field, name], at) => {
      let isOpen = false;
      const steps = points.map((each) => {
        const value = each[field];
        if (!Number.isFinite(value)) {
          isOpen = false;
          return "";
        }
        const x = WIDTH * (1 - (nowS - each.now_s) / spanS);
        const y = HEIGHT - 2 - ((HEIGHT - 4) * value) / (highest || 1);
        const step = `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
        isOpen = true;
        return step;
      });
      paths[at].setAttribute("d", steps.join(""));
      const last = points.at(-1)?.[field];
      values[at].textContent = Number.isFinite(last) ? `${name} ${format(last)}` : name;
    });
  }
}
