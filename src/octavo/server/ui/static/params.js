// The parameters of requests. They show the model's own defaults, and only what was set is sent.

import { button, byId, el } from "./dom.js";

const NAME = "octavo-parameters";
const NUMBERS = [
  ["temperature", "Temperature", "0: always the most likely token", 0, 2, 0.05],
  ["top_p", "Top p", "the most likely tokens that have this probability together", 0, 1, 0.01],
  ["top_k", "Top k", "this many of the most likely tokens; -1: all", -1, 1000, 1],
  ["min_p", "Min p", "tokens with this fraction of the best one's probability", 0, 1, 0.01],
  ["max_tokens", "Max tokens", "empty: up to the end of the context", 1, 1e7, 1],
  ["seed", "Seed", "empty: another answer each time", 0, 2 ** 53, 1],
  ["presence_penalty", "Presence penalty", "", -2, 2, 0.05],
  ["frequency_penalty", "Frequency penalty", "", -2, 2, 0.05],
  ["repetition_penalty", "Repetition penalty", "", 0.01, 2, 0.01],
];
const TEXTS = [
  ["stop", "Stop at", "one text per line; the answer ends before it", 2],
  ["tools", "Tools", "a JSON list, as in the API", 5],
  ["schema", "JSON schema", "answers follow it", 5],
  ["extra", "More fields", 'a JSON object, such as {"reasoning_effort": "low"}', 2],
];

export class Parameters {
  constructor() {
    this.defaults = {};
    this.set = read();
    this.inputs = {};
    const rows = NUMBERS.map(([name, label, hint, min, max, step]) => this.row(name, label, hint, el("input", {
      type: "number", min, max, step, inputMode: "decimal",
    })));
    const texts = TEXTS.map(([name, label, hint, lines]) => this.row(name, label, hint, el("textarea", {
      rows: lines, spellcheck: false,
    })));
    const box = el("input", { type: "checkbox", id: "p-probabilities", checked: Boolean(this.set.probabilities) });
    box.addEventListener("change", () => this.keep("probabilities", box.checked));
    this.onModel = () => {};
    this.model = el("select", { id: "p-model", onchange: () => {
      this.keep("model", this.model.value);
      this.onModel();
    } });
    byId("parameters").append(
      el("h2", {}, "Parameters"),
      el("div", { class: "field" }, el("label", { htmlFor: "p-model" }, "Model"), this.model),
      ...rows,
      el("div", { class: "field check" }, box, el("label", { htmlFor: "p-probabilities" }, "Token probabilities")),
      ...texts,
      button("Reset parameters", () => this.reset()),
    );
    this.box = box;
  }

  row(name, label, hint, input) {
    input.id = `p-${name}`;
    if (hint) input.setAttribute("aria-describedby", `h-${name}`);
    input.addEventListener("input", () => this.keep(name, input.value));
    this.inputs[name] = input;
    return el("div", { class: "field" }, el("label", { htmlFor: input.id }, label), input,
      hint ? el("p", { class: "hint", id: `h-${name}` }, hint) : null);
  }

  /** Take over the names of the server's models. */
  models(names) {
    const chosen = names.includes(this.set.model) ? this.set.model : names[0];
    this.model.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
  }

  /** Take over what the server says about the chosen model. */
  about({ defaults }) {
    this.defaults = defaults;
    this.show();
  }

  show() {
    for (const [name, input] of Object.entries(this.inputs)) {
      input.value = this.set[name] ?? this.defaults[name] ?? "";
    }
    this.box.checked = Boolean(this.set.probabilities);
  }

  keep(name, value) {
    if (value === "" || value === false) delete this.set[name]; // the default again
    else this.set[name] = value;
    localStorage.setItem(NAME, JSON.stringify(this.set));
  }

  reset() {
    this.set = {};
    localStorage.removeItem(NAME);
    this.show();
  }

  /** Return the fields of a request. Raises Error, in words: which field cannot be sent. */
  fields() {
    const fields = { model: this.model.value || undefined };
    for (const [name, label] of NUMBERS) {
      if (this.inputs[name].validity.badInput) throw new Error(`${label} must be a number.`);
      if (this.set[name] !== undefined) fields[name] = Number(this.set[name]);
    }
    if (this.set.stop?.trim()) fields.stop = this.set.stop.split("\n").filter(Boolean);
    if (this.set.tools?.trim()) fields.tools = parsed("Tools", this.set.tools);
    if (this.set.schema?.trim()) {
      const schema = parsed("JSON schema", this.set.schema);
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (this.set.probabilities) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    return this.set.extra?.trim() ? { ...fields, ...parsed("More fields", this.set.extra) } : fields;
  }
}

function parsed(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}

function read() {
  try {
    const value = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    return value !== null && typeof value === "object" ? value : {};
  } catch {
    return {}; // what another program has left there
  }
}
