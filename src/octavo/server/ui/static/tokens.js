// An answer token by token: how likely each was, and what else could have come. By pointer, and by arrow keys.

import { el } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

/** Return a view of tokens. */
export function tokenView(tokens) {
  const about = el("div", { class: "token-about", role: "status", hidden: true });
  const spans = tokens.map(({ token, logprob }, at) => el("span", {
    class: `token p${Math.min(9, Math.floor(Math.exp(logprob) * 10))}`, dataset: { at },
  }, token));
  const text = el("div", { class: "token-text", tabIndex: 0, role: "group",
    "aria-label": "Tokens with their probabilities; arrow keys go from one to the next" }, ...spans);
  let current = -1;

  function show(at) {
    spans[current]?.classList.remove("current");
    current = at;
    spans[at].classList.add("current");
    const { token, logprob, top } = tokens[at];
    about.hidden = false;
    about.replaceChildren(el("p", {}, el("code", {}, JSON.stringify(token)), ` ${percent(logprob)}`),
      el("ol", {}, ...top.map(([other, its]) => el("li", { class: other === token ? "chosen" : "" },
        el("code", {}, JSON.stringify(other)), ` ${percent(its)}`))));
  }

  text.addEventListener("mouseover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) show(Number(at));
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(Math.min(spans.length - 1, Math.max(0, current + step)));
  });
  text.addEventListener("focus", () => { if (current < 0 && spans.length) show(0); });
  return el("div", { class: "tokens" }, text, about);
}
