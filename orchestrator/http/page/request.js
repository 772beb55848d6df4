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

  /** Take one event of the stream; return the tokens that it brings. */
  take(event) {
    const choice = event.choices?.[0];
    const extra = event.outrider ?? {};
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (extra.notice) this.notices.push(extra.notice);
    if (extra.speculation_off) this.off = extra.speculation_off;
    const text = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    const told = choice?.logprobs?.content ?? [];
    const pieces = this.#cutter.cut(thought + text, told.map((each) => each.bytes ?? null));
    const tokens = pieces.map((piece, index) => tokenOf(piece, index, told, extra));
    if (!tokens.length) return [];
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.text += text;
    this.thoughts += thought;
    this.tokens.push(...tokens);
    return tokens;
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

function tokenOf(piece, index, told, extra) {
  const known = told[index];
  return {
    text: piece,
    id: extra.token_ids?.[index] ?? null,
    kind: extra.kinds?.[index] ?? null,
    position: (extra.start ?? 0) + index,
    logprob: known?.logprob ?? null,
    top: (known?.top_logprobs ?? []).map(({ token, logprob }) => ({ text: token, logprob })),
  };
}

/** Ask, and hand over what comes; returns once the answer is complete. */
export async function run(body, answer, onTokens, signal) {
  for await (const event of stream("v1/chat/completions", { body, signal })) onTokens(answer.take(event), answer);
}
