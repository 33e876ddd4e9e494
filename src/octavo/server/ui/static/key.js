// The API key: in session storage only, so it ends with the tab, and is in no address, log or export.

import { byId } from "./dom.js";

const NAME = "octavo-key";
let asking = null; // one dialog for all requests that wait for it

export const storedKey = () => sessionStorage.getItem(NAME) ?? "";

/** Ask the user for a key; resolves when there is another one than `refused`. */
export function askForKey(why, refused) {
  if (storedKey() !== refused) return Promise.resolve(); // given meanwhile
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    byId("key-why").textContent = why;
    input.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(NAME, input.value.trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim()) dialog.close();
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}
