// Every option in effect, with its origin: those that somebody has set first.

import { el } from "./dom.js";

export class SettingsTable {
  constructor() {
    this.body = el("tbody");
    this.profile = el("p", { class: "hint" });
    const filter = el("input", { type: "search", id: "settings-filter", placeholder: "Find an option" });
    filter.addEventListener("input", () => this.filter(filter.value.trim().toLowerCase()));
    this.node = el("section", {}, el("h2", {}, "Settings"),
      this.profile, el("label", { htmlFor: "settings-filter" }, "Find an option"), filter,
      el("div", { class: "wide scrolls", tabIndex: 0, role: "region", "aria-label": "Settings" },
        el("table", {}, el("thead", {}, el("tr", {},
          ...["Option", "Value", "Origin"].map((head) => el("th", { scope: "col" }, head)))), this.body)));
  }

  show({ settings, profile, max_model_len: length }) {
    this.profile.textContent = `${profile}; context of ${length} tokens`;
    const sorted = [...settings].sort((a, b) => (a.origin === "default") - (b.origin === "default"));
    this.body.replaceChildren(...sorted.map(({ name, value, origin }) => el("tr", { dataset: { name },
      class: origin === "default" ? "" : "set" },
    el("td", {}, name), el("td", {}, typeof value === "string" ? value : JSON.stringify(value)), el("td", {}, origin))));
  }

  filter(text) {
    for (const row of this.body.children) row.hidden = !row.dataset.name.includes(text);
  }
}
