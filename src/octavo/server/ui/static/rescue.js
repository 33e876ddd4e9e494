// Answers that are being written while the page is closed or reloaded: the database may take no more, so their texts
// wait in local storage for the next page.

const PREFIX = "octavo-cut-off-";
export const CUT_OFF = "The page was closed before the answer was complete.";

/** Set aside what there is of these messages. */
export function rescue(messages) {
  for (const { numPieces: _, waits: __, tokens: ___, ...message } of messages) {
    const kept = { ...message, status: "failed", error: CUT_OFF, saved: Date.now() };
    try {
      localStorage.setItem(PREFIX + message.id, JSON.stringify(kept));
    } catch {
      return; // there is no room: what was saved last remains
    }
  }
}

/** Hand what pages before this one have set aside to `keep`, and forget it then. */
export async function takeRescued(keep) {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  if (!names.length) return;
  await keep(names.map((name) => JSON.parse(localStorage.getItem(name))));
  for (const name of names) localStorage.removeItem(name);
}
