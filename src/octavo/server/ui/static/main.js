// The page: its views, and what they share.

import { json } from "./api.js";
import { Chat, OPEN, Sidebar } from "./chat.js";
import { announce, byId, saveFile } from "./dom.js";
import { EngineView } from "./engine.js";
import { Parameters } from "./params.js";
import { takeRescued } from "./rescue.js";
import { Store } from "./store.js";
import { exported, imported } from "./transfer.js";

const VIEWS = ["chat", "engine"];

function showView(name, engine) {
  for (const each of VIEWS) {
    const tab = byId(`${each}-tab`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  if (name === "engine") engine.start();
  else engine.stop();
}

function connectTabs(engine) {
  for (const [at, name] of VIEWS.entries()) {
    const tab = byId(`${name}-tab`);
    tab.addEventListener("click", () => {
      history.replaceState(null, "", name === "engine" ? "#engine" : location.pathname);
      showView(name, engine);
    });
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      const other = byId(`${VIEWS[1 - at]}-tab`);
      other.click();
      other.focus();
    });
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) engine.stop();
    else if (!byId("engine").hidden) engine.start();
  });
  showView(location.hash === "#engine" ? "engine" : "chat", engine);
}

/** A button that shows a panel beside the chat, or over it on a phone. */
function connectPanel(buttonId, panelId) {
  const toggle = byId(buttonId);
  const panel = byId(panelId);
  const set = (isOpen) => {
    panel.classList.toggle("open", isOpen);
    toggle.setAttribute("aria-expanded", String(isOpen));
  };
  toggle.addEventListener("click", () => {
    set(!panel.classList.contains("open"));
    if (panel.classList.contains("open")) panel.querySelector("button, input, select, textarea")?.focus();
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    set(false);
    toggle.focus();
  });
  return set;
}

/** Ask the server for its models, and about the chosen one, until it answers or another one is chosen. */
async function waitForModel(chat, parameters, engine) {
  const isFirst = !parameters.model.options.length;
  const asked = isFirst ? null : parameters.model.value;
  let described = null;
  for (;;) {
    try {
      if (!parameters.model.options.length) parameters.models((await json("v1/models")).data.map(({ id }) => id));
      const name = parameters.model.value;
      if (asked !== null && name !== asked) return;
      engine.choose(name);
      if (name !== described) parameters.about({ defaults: {} }); // not those of the model before
      described = name;
      const about = await json(`ui/about?model=${encodeURIComponent(name)}`);
      parameters.about(about);
      engine.about(about);
      chat.attachments.takesImages = about.takes_images;
      byId("about").textContent = `${name} · Octavo ${about.version}`;
      chat.say("");
      return;
    } catch (error) {
      const isAway = error.code === "unloaded";
      byId("about").textContent = isAway ? `${parameters.model.value} · is loaded when you ask it something` : error.message;
      if (isAway) chat.attachments.takesImages = true; // or it says so
      await new Promise((resolve) => setTimeout(resolve, 1000 * (isAway ? 3 : error.retryAfter ?? 3)));
    }
  }
}

async function main() {
  const parameters = new Parameters();
  const engine = new EngineView();
  connectTabs(engine);
  const showConversations = connectPanel("conversations-toggle", "sidebar");
  connectPanel("parameters-toggle", "parameters");
  let chat = null;
  const store = await Store.open(async (id) => {
    await sidebar.reload();
    if ((id === null || id === chat.conversation?.id) && !chat.isEditing) await chat.reload();
  });
  const sidebar = new Sidebar(store, {
    async save() {
      saveFile("octavo-conversations.json", exported(await store.everything()));
      announce("Exported");
    },
    async load(file) {
      if (!file) return;
      try {
        const { conversations, messages } = imported(await file.text());
        await store.merge(conversations, messages);
        await sidebar.reload();
        await chat.reload();
        chat.say("");
        announce(`${conversations.length} conversations imported`);
      } catch (error) {
        chat.say(error.message);
      }
    },
  });
  chat = new Chat(store, parameters, sidebar);
  sidebar.onOpen = async (id) => {
    showConversations(false);
    await chat.open(id);
  };
  await takeRescued((messages) => store.put(null, messages));
  await sidebar.reload();
  const last = sessionStorage.getItem(OPEN) ?? "";
  await chat.open(sidebar.all.some(({ id }) => id === last) ? last : null);
  parameters.onModel = () => waitForModel(chat, parameters, engine);
  await waitForModel(chat, parameters, engine);
}

main().catch((error) => {
  const line = byId("problem");
  line.textContent = `The page cannot start: ${error.message}`;
  line.hidden = false;
});
