// The KV blocks of each group as a map: a cell is a block, or every second or third of very many.

import { el } from "./dom.js";

const FREE = -1;
const CACHED = -2;
const SHARED = -3;
const CELL = 7; // pixels, with the gap
const KINDS = { attention: "attention", latent: "latent attention", recurrent: "recurrent state" };

/** A colour for a request's number: neighbours differ, on light and on dark. */
const hue = (owner) => `hsl(${(owner * 137.5) % 360} 62% ${48 + 8 * (owner % 2)}%)`;

export class KvMap {
  constructor() {
    this.groups = el("div");
    this.key = el("ul", { class: "map-key" });
    this.node = el("section", { "aria-labelledby": "map-title" }, el("h2", { id: "map-title" }, "KV blocks"), this.groups,
      this.key);
  }

  show(groups, requests) {
    const running = requests.filter(({ status }) => status === "prefill" || status === "decode");
    const style = getComputedStyle(document.documentElement);
    const colors = { [FREE]: style.getPropertyValue("--map-free"), [CACHED]: style.getPropertyValue("--map-cached"),
      [SHARED]: style.getPropertyValue("--map-shared") };
    while (this.groups.children.length > groups.length) this.groups.lastChild.remove();
    groups.forEach((group, at) => {
      this.groups.children[at] ?? this.groups.append(el("figure", {}, el("figcaption"), el("canvas", { role: "img" })));
      const [caption, canvas] = this.groups.children[at].children;
      const num = countKinds(group.runs);
      const window = group.window ? `, window of ${group.window}` : "";
      const replica = groups.some((each) => each.replica) ? `, engine ${group.replica}` : "";
      const scale = group.stride > 1 ? `; a cell stands for ${group.stride}` : "";
      const used = group.num_blocks - group.num_free;
      const text = `${KINDS[group.kind] ?? group.kind}${window}${replica}: ${used} of ${group.num_blocks} blocks in use${scale}`;
      if (caption.textContent !== text) caption.textContent = text;
      canvas.setAttribute("aria-label", `${text}; ${num.cached} cells hold cached prefixes, ${num.shared} are shared`);
      draw(canvas, group.runs, colors);
    });
    const own = running.slice(0, 12).map((request, owner) => entry(hue(owner), request.name ?? `#${request.id}`));
    this.key.replaceChildren(entry(colors[FREE], "free"), entry(colors[CACHED], "cached prefix"),
      entry(colors[SHARED], "prefix of several requests"), ...own);
  }
}

function entry(color, text) {
  const box = el("span", { class: "box" });
  box.style.background = color;
  return el("li", {}, box, text);
}

function countKinds(runs) {
  const sum = (kind) => runs.filter(([owner]) => owner === kind).reduce((total, [, count]) => total + count, 0);
  return { cached: sum(CACHED), shared: sum(SHARED) };
}

function draw(canvas, runs, colors) {
  const width = canvas.parentElement.clientWidth || 600;
  const columns = Math.max(1, Math.floor(width / CELL));
  const num = runs.reduce((total, [, count]) => total + count, 0);
  const scale = devicePixelRatio || 1;
  canvas.width = columns * CELL * scale;
  canvas.height = Math.ceil(num / columns) * CELL * scale;
  canvas.style.width = `${columns * CELL}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  let at = 0;
  for (const [owner, count] of runs) {
    context.fillStyle = colors[owner] ?? hue(owner);
    for (const end = at + count; at < end; at++) {
      context.fillRect((at % columns) * CELL, Math.floor(at / columns) * CELL, CELL - 1, CELL - 1);
    }
  }
}
