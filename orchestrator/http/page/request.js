// One request for a chat: what is sent, and what an answer's chunks say.

import { stream } from "./api.js";
import { at } from "./dom.js";
import { Cutter } from "./pieces.js";

const TOP = 5;

/** Return the settings of the form, or say which field is wrong and give null. */
export function readSettings() {
  const form = at("settings-form");
  if (!form.reportValidity()) return null;
  const value = (id) => at(id).value.trim();
  return {
    model: value("set-model"),
    drafter: value("set-drafter"),
    off: value("set-speculation") === "off",
    maxTokens: value("set-tokens"),
    temperature: value("set-temperature"),
    seed: value("set-seed"),
  };
}

/** Whether two answers to a request must have the same text. */
export function isRepeatable(settings) {
  return settings.seed !== "" || Number(settings.temperature) === 0;
}

/** Return the body of a request in OpenAI's terms, with our own under `outrider`. */
export function bodyOf(settings, messages) {
  const extra = { return_token_origin: true };
  if (settings.off) extra.off = true;
  else if (settings.drafter) extra.drafter = settings.drafter;
  return {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: TOP,
    outrider: extra,
    temperature: Number(settings.temperature),
    ...(settings.model && { model: settings.model }),
    ...(settings.maxTokens && { max_completion_tokens: Number(settings.maxTokens) }),
    ...(settings.seed && { seed: Number(settings.seed) }),
  };
}

/** An answer as it comes. */
export class Answer {
  text = "";
  thoughts = "";
  tokens = [];
  finish = "";
  off = "";
  notices = [];
  startedMs = performance.now();
  firstMs = null;
  lastMs = null;
  #cutter = new Cutter();

  /** Take one event of the stream; return the tokens that it brings, and text that belongs to the token before. */
  take(event) {
    const choice = event.choices?.[0];
    this.#takeEnd(choice?.finish_reason, event.outrider ?? {});
    const text = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    this.text += text;
    this.thoughts += thought;
    const tokens = this.#tokensOf(choice ?? {}, thought + text);
    if (tokens.length) {
      this.lastMs = performance.now();
      this.firstMs ??= this.lastMs;
    }
    this.tokens.push(...tokens);
    return { tokens, tail: tokens.length ? "" : thought + text };
  }

  #takeEnd(reason, { notices = [], figures = {} }) {
    if (reason) this.finish = reason;
    if (figures.speculation_off) this.off = figures.speculation_off;
    this.notices.push(...notices.map((notice) => notice.text || notice.reason));
  }

  /** Return the tokens of a choice, with the text cut among them. */
  #tokensOf({ outrider: origin = {}, logprobs }, text) {
    const ids = origin.token_ids ?? [];
    const told = logprobs?.content ?? [];
    const pieces = this.#cutter.cut(text, ids.map((_, index) => told[index]?.bytes ?? null));
    return ids.map((id, index) => ({
      id,
      text: pieces[index],
      kind: origin.kinds?.[index] ?? "",
      position: origin.start + index,
      logprob: told[index]?.logprob ?? null,
      top: (told[index]?.top_logprobs ?? []).map(({ token, logprob }) => ({ text: token, logprob })),
    }));
  }

  /** Seconds from the request to the last token, or to now while there is none. */
  get seconds() {
    return ((this.lastMs ?? performance.now()) - this.startedMs) / 1000;
  }

  /** Tokens a second behind the first chunk; 0 while there are too few. */
  get rate() {
    const passed = (this.lastMs - this.firstMs) / 1000;
    return passed > 0 ? (this.tokens.length - 1) / passed : 0;
  }

  /** How many tokens are of each origin, by label. */
  get counts() {
    const counts = {};
    for (const { kind } of this.tokens) counts[kind] = (counts[kind] ?? 0) + 1;
    return counts;
  }
}

/** Ask, and show what comes in a view; returns once the answer is complete. */
export async function run(body, answer, view, onTokens, signal) {
  for await (const event of stream("v1/chat/completions", { body, signal })) {
    const { tokens, tail } = answer.take(event);
    view.add(tokens, tail);
    if (tokens.length) onTokens();
  }
}
