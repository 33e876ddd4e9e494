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
      const kind = /^(image|video)\//.exec(file.type)?.[1];
      if (!kind) {
        this.onProblem(`${file.name} is neither an image nor a video.`);
      } else if (!this.takesImages) {
        this.onProblem(`This model reads text only, so ${file.name} cannot be attached.`);
      } else {
        this.items.push({ kind, name: file.name, url: await dataUrl(file) });
        announce(`${file.name} attached`);
      }
    }
    this.show();
  }

  show() {
    this.list.replaceChildren(...this.items.map((item) => el("li", {}, preview(item), el("span", {}, item.name),
      button("Remove", () => {
        this.items = this.items.filter((each) => each !== item);
        this.show();
        byId("message").focus();
      }, { label: `Remove ${item.name}` }))));
  }

  take() {
    const taken = this.items;
    this.items = [];
    this.show();
    return taken;
  }
}

export function preview({ kind, name, url }) {
  return kind === "video"
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
