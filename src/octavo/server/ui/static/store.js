// Conversations, in IndexedDB. A message is a record of its own that is never replaced by another's, so two tabs that go
// on with one conversation make two branches of it.

const VERSION = 1;
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("octavo-conversations") : null;

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export class Store {
  /** Open the database; `onChange(conversationId)` is called when another tab has changed something. */
  static async open(onChange) {
    const opening = indexedDB.open("octavo", VERSION);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("conversations", { keyPath: "id" });
      opening.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    const store = new Store();
    store.database = await done(opening);
    if (channel) channel.onmessage = (event) => onChange(event.data);
    return store;
  }

  async conversations() {
    const all = await done(this.database.transaction("conversations").objectStore("conversations").getAll());
    return all.sort((one, other) => other.updated - one.updated);
  }

  conversation(id) {
    return done(this.database.transaction("conversations").objectStore("conversations").get(id));
  }

  messages(conversation) {
    const index = this.database.transaction("messages").objectStore("messages").index("conversation");
    return done(index.getAll(conversation));
  }

  /** Keep a conversation's title, instructions and chosen branches, and messages of it. */
  async put(conversation, messages = []) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const ended = finished(transaction);
    if (conversation) transaction.objectStore("conversations").put(conversation);
    for (const message of messages) transaction.objectStore("messages").put(message);
    await ended;
    channel?.postMessage(conversation?.id ?? messages[0]?.conversation);
  }

  async remove(id) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const ended = finished(transaction);
    transaction.objectStore("conversations").delete(id);
    const cursor = transaction.objectStore("messages").index("conversation").openKeyCursor(id);
    cursor.onsuccess = () => {
      if (!cursor.result) return;
      transaction.objectStore("messages").delete(cursor.result.primaryKey);
      cursor.result.continue();
    };
    await ended;
    channel?.postMessage(id);
  }

  /** Add conversations of a file. Messages that are here already stay as they are. */
  async merge(conversations, messages) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const ended = finished(transaction);
    for (const [name, records] of [["conversations", conversations], ["messages", messages]]) {
      const target = transaction.objectStore(name);
      for (const record of records) {
        const found = target.getKey(record.id);
        found.onsuccess = () => { if (found.result === undefined) target.put(record); };
      }
    }
    await ended;
    channel?.postMessage(null);
  }

  async everything() {
    const transaction = this.database.transaction(["conversations", "messages"]);
    const read = (name) => done(transaction.objectStore(name).getAll());
    const [conversations, messages] = await Promise.all([read("conversations"), read("messages")]);
    return { conversations, messages };
  }
}
