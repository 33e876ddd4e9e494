// Markdown to nodes. marked finds the structure; every text becomes a text node, and HTML stays text.

import { Lexer } from "./vendor/marked.esm.js";
import { copyButton, el } from "./dom.js";

const NUM_OPEN = 2; // blocks at the end of a text that still grows: later characters may change them
const SIGNS = /[*_~`[\]<>!&\\]/g; // that may begin or end something
const MOST_SIGNS = 600; // of one paragraph, cell or item
const SLOW_MS = 60; // a last block that takes longer is shown as it is until the text is complete

/** Shows a text that grows at its end: blocks that can no longer change are left alone. */
export class MarkdownView {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.reset();
  }

  reset() {
    this.node.replaceChildren();
    this.tail = [];
    this.text = "";
    this.numDone = 0; // characters of blocks that are complete
    this.isPlain = false;
  }

  /** Show `text`, which begins with what was shown before; `isWhole`: nothing more comes. */
  show(text, isWhole) {
    if (!text.startsWith(this.text)) this.reset();
    if (this.isPlain && !isWhole) {
      this.tail[0].append(text.slice(this.text.length));
      this.text = text;
      return;
    }
    const startMs = performance.now();
    this.text = text;
    this.isPlain = false;
    let rest = text.slice(this.numDone);
    const blocks = lex(rest);
    for (const node of this.tail) node.remove();
    this.tail = [];
    let numClosed = isWhole ? blocks.length : Math.max(0, blocks.length - NUM_OPEN);
    for (const block of blocks) {
      const nodes = blockNodes(block);
      this.node.append(...nodes);
      if (numClosed-- > 0) this.numDone += block.raw.length;
      else this.tail.push(...nodes);
    }
    if (!isWhole && performance.now() - startMs > SLOW_MS) {
      rest = text.slice(this.numDone);
      for (const node of this.tail) node.remove();
      this.tail = [el("p", { class: "plain" }, rest)];
      this.node.append(...this.tail);
      this.isPlain = true;
    }
  }
}

/** Return the blocks of a text. The steps are marked's own; a paragraph of thousands of signs, for which it needs
 * minutes, stays as it is. */
function lex(text) {
  const lexer = new Lexer({ gfm: true });
  try {
    lexer.blockTokens(text.replaceAll("\r", ""), lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if ((src.match(SIGNS)?.length ?? 0) > MOST_SIGNS) tokens.push({ type: "plain", raw: src });
      else lexer.inlineTokens(src, tokens);
    }
    return lexer.tokens;
  } catch {
    return [{ type: "plain", raw: text }]; // nested thousands of times
  }
}

function blockNodes(token) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading":
      return [el(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens))];
    case "paragraph":
      return [el("p", {}, ...inline(token.tokens))];
    case "text":
      return token.tokens ? inline(token.tokens) : [token.text];
    case "code":
      return [codeBlock(token)];
    case "blockquote":
      return [el("blockquote", {}, ...token.tokens.flatMap(blockNodes))];
    case "list":
      return [list(token)];
    case "table":
      return [table(token)];
    case "hr":
      return [el("hr")];
    default: // HTML, and what is unknown
      return [el("p", { class: "plain" }, token.raw)];
  }
}

function codeBlock({ text, lang }) {
  const name = (lang ?? "").trim().split(/\s/)[0];
  return el("div", { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, name || "text"),
      copyButton(() => text, "Copy", { label: "Copy code" })),
    el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function list({ ordered, start, items }) {
  const nodes = items.map((item) => {
    const box = item.task ? [el("input", { type: "checkbox", checked: item.checked, disabled: true,
      "aria-label": item.checked ? "done" : "to do" }), " "] : [];
    return el("li", {}, ...box, ...item.tokens.flatMap(blockNodes));
  });
  return ordered ? el("ol", { start: Number(start) || 1 }, ...nodes) : el("ul", {}, ...nodes);
}

function table({ header, rows, align }) {
  const cell = (tag) => (one, at) => el(tag, { class: align[at] ? `to-${align[at]}` : "" }, ...inline(one.tokens));
  return el("div", { class: "wide", tabIndex: 0 }, el("table", {},
    el("thead", {}, el("tr", {}, ...header.map(cell("th")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td")))))));
}

const INLINE = { strong: "strong", em: "em", del: "del" };

function inline(tokens = []) {
  return tokens.flatMap((token) => {
    if (INLINE[token.type]) return [el(INLINE[token.type], {}, ...inline(token.tokens))];
    if (token.type === "codespan") return [el("code", {}, token.text)];
    if (token.type === "br") return [el("br")];
    if (token.type === "link") return [link(token, inline(token.tokens))];
    if (token.type === "image") return [link(token, [token.text || token.href])]; // nothing is fetched from elsewhere
    if (token.type === "text" && token.tokens) return inline(token.tokens);
    if (token.type === "text" || token.type === "escape") return [token.text];
    return [token.raw];
  });
}

function link({ href, raw }, children) {
  let url = null;
  try {
    url = new URL(href);
  } catch {
    return el("span", {}, raw); // relative: there is nothing that it could belong to
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", {}, raw);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
