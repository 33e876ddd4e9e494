// Nodes without HTML: whatever a text says, it is inserted as text.

/** Return a new element. `on…` are listeners, `class` and `dataset` as named; children are nodes or texts. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return an SVG element; attributes only. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Return a button whose visible text, or `label`, is its name. */
export function button(text, onclick, props = {}) {
  const { label, ...rest } = props;
  return el("button", { type: "button", onclick, "aria-label": label, ...rest }, text);
}

export const byId = (id) => document.getElementById(id);

/** Copy to the clipboard; pages of servers without TLS have no `navigator.clipboard`. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "off-screen", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("This browser does not let the page copy.");
}

/** Return a button that copies what `text()` returns, and says so. */
export function copyButton(text, name = "Copy", props = {}) {
  const node = button(name, async () => {
    try {
      await copyText(text());
      node.textContent = "Copied";
      announce("Copied");
    } catch (error) {
      announce(`Not copied: ${error.message}`);
      node.textContent = "Not copied";
    }
    setTimeout(() => { node.textContent = name; }, 1500);
  }, props);
  return node;
}

/** Say something in the live region, for screen readers. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  region.append(text);
}

/** Let the browser save a text as a file. */
export function saveFile(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A random id; `crypto.randomUUID` does not exist on pages without TLS. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const seconds = (ms) => (ms < 10_000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms / 1000)} s`);

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at++) count /= 1024;
  return `${count < 10 && at ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

/** A duration in words; `Infinity` and nothing, too. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === Infinity) return "long";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}
