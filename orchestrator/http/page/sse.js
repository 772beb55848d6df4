// Reads server-sent events from a response. `EventSource` would do it, but it can neither POST nor send a key.

const MAX_EVENT = 1 << 22;

/** Yield the data of each event of a response's body, without comments and names. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split(/\r\n\r\n|\n\n|\r\r/);
      rest = parts.pop();
      if (rest.length > MAX_EVENT) throw new Error("the server sends an event without an end");
      for (const part of parts) {
        const data = dataOf(part);
        if (data !== null) yield data;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the connection is gone already
  }
}

/** Return the data of one event, its lines joined; null where it has none, as in a comment. */
export function dataOf(event) {
  const lines = event
    .split(/\r\n|\n|\r/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(line.startsWith("data: ") ? 6 : 5));
  return lines.length ? lines.join("\n") : null;
}
