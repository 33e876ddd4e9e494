// Images and videos for the next message: chosen, dropped or pasted.

import { announce, button, byId, el } from "./dom.js";

export class Attachments {
  constructor(onProblem) {
    this.items = [];
    this.onProblem = onProblem;
    this.takesImages = true;
    this.list = byId("attachments");
    const picker = byId("attach-file");
    byId("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.add(picker.files);
      picker.value = "";
    });
    const view = byId("chat");
    view.addEventListener("dragover", (event) => {
      event.preventDefault();
      view.classList.add("dropping");
    });
    view.addEventListener("dragleave", () => view.classList.remove("dropping"));
    view.addEventListener("drop", (event) => {
      event.preventDefault();
      view.classList.remove("dropping");
      this.add(event.dataTransfer.files);
    });
    byId("message").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    for (const file of files) {
      let kind = /^(image|video)\//.exec(file.type)?.[1];
      if (!kind) {
        this.onProblem(`${file.name} is neither an image nor a video.`);
      } else if (!this.takesImages) {
        this.onProblem(`This model reads text only, so ${file.name} cannot be attached.`);
      } else {
        if (file.type === "image/gif" && await isAnimated(file)) kind = "video";
        this.items.push({ kind, name: file.name, url: await dataUrl(file) });
        announce(`${file.name} attached`);
      }
    }
    this.show();
  }

  show() {
    this.list.replaceChildren(...attachmentNodes(this.items, (item) => {
      this.items = this.items.filter((each) => each !== item);
      this.show();
      byId("message").focus();
    }));
  }

  take() {
    const taken = this.items;
    this.items = [];
    this.show();
    return taken;
  }
}

/** Return an entry for each attachment, with a button that removes it. */
export const attachmentNodes = (items, onRemove) => items.map((item) => el("li", {}, preview(item), el("span", {}, item.name),
  button("Remove", () => onRemove(item), { label: `Remove ${item.name}` })));

/** Whether a GIF has several pictures: models see those as videos. */
async function isAnimated(file) {
  const text = new TextDecoder("latin1").decode(await file.arrayBuffer());
  return text.split("\x21\xf9\x04").length > 2; // each picture of several has such a block before it
}

export function preview({ kind, name, url }) {
  return kind === "video" && !url.startsWith("data:image/")
    ? el("video", { src: url, controls: true, muted: true, "aria-label": name })
    : el("img", { src: url, alt: name });
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
