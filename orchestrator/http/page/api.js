// Talks to the server that the page came from. The key is kept here, in memory, and nowhere else.

import { events } from "./sse.js";

const ROOT = new URL("./", import.meta.url);
let key = "";

/** Use an API key from now on; empty: none. */
export function useKey(value) {
  key = value.trim();
}

/** What went wrong, in words for people, with advice where there is any. */
export class Problem extends Error {
  constructor(text, advice = "", status = 0) {
    super(text);
    this.advice = advice;
    this.status = status;
  }
}

/** Return an answer's JSON. */
export async function getJson(path, signal) {
  const response = await ask(path, { signal });
  return response.json();
}

/** Yield the events of a stream as parsed JSON; behind the last one `finished` tells whether it ended in order. */
export async function* stream(path, { body, signal } = {}) {
  const options = body ? { method: "POST", body: JSON.stringify(body), signal } : { signal };
  const response = await ask(path, options);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw fromServer(event.error, response);
      yield event;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    throw new Problem("The connection to the server was lost.", "What came before stays here. Ask again to go on.");
  }
  if (body) throw new Problem("The answer broke off: the server closed the connection before its end.", "Ask again.");
}

async function ask(path, options) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.", "Is it running? Ask again once it is.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({})); // a proxy's error page is no JSON; the status says enough
  throw fromServer(answer.error ?? {}, response);
}

/** Turn an error in OpenAI's shape into a problem. */
function fromServer(error, response) {
  const text = typeof error.message === "string" && error.message ? error.message : `status ${response.status}`;
  const field = error.param ? ` (field ${error.param})` : "";
  return new Problem(`The server refused: ${text}${field}`, advice(response), response.status);
}

function advice(response) {
  const after = Number(response.headers.get("Retry-After"));
  switch (response.status) {
    case 401:
      return "Put a valid API key into the field at the top of the page.";
    case 429:
      return after > 0 ? `Try again in ${Math.ceil(after)} seconds.` : "Try again in a while.";
    case 503:
      return "The cluster cannot serve now. The cluster view shows which workers there are.";
    default:
      return "";
  }
}
