// The race: one request with drafts and without, side by side, with times, rates, and whether the texts are equal.

import { Problem } from "./api.js";
import { footOf } from "./chat.js";
import { at, make, number, problem, refill, say, seconds } from "./dom.js";
import { Answer, bodyOf, isRepeatable, readSettings, run } from "./request.js";
import { TokenView } from "./tokens.js";

let calling = null;

/** Make the race's form work. */
export function startRace() {
  at("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const settings = readSettings();
    const text = at("race-prompt").value;
    if (settings && text.trim() && !calling) race(settings, text);
  });
  at("race-stop").addEventListener("click", () => calling?.abort());
}

async function race(settings, text) {
  const together = at("race-form").elements["race-order"].value === "together";
  const messages = [{ role: "user", content: text }];
  const lanes = [
    new Lane("lane-with", "Answer with drafts", bodyOf({ ...settings, off: false }, messages), settings.maxTokens),
    new Lane("lane-without", "Answer without drafts", bodyOf({ ...settings, off: true }, messages), settings.maxTokens),
  ];
  calling = new AbortController();
  setBusy(true);
  say(at("race-status"), together ? "Both are under way …" : "With drafts is under way, then without …");
  const { signal } = calling;
  if (together) await Promise.all(lanes.map((lane) => lane.go(signal)));
  else for (const lane of lanes) if (!signal.aborted) await lane.go(signal);
  say(at("race-status"), verdict(lanes, settings, signal.aborted));
  calling = null;
  setBusy(false);
}

function setBusy(busy) {
  at("race-stop").disabled = !busy;
  at("race-form").querySelector("[type=submit]").disabled = busy;
}

/** One of the two. */
class Lane {
  constructor(id, label, body, most) {
    this.view = new TokenView(label);
    this.body = body;
    this.most = Number(most) || 0;
    this.answer = null;
    this.complete = false;
    this.figures = make("p", { class: "figures" }, "waits for its turn");
    this.bar = make("span", { class: "bar wide", "aria-hidden": "true" });
    this.foot = make("div", { class: "foot" });
    refill(at(id), at(id).querySelector("h2"), this.figures, this.bar, this.view.root, this.foot);
  }

  async go(signal) {
    this.answer = new Answer();
    this.figures.textContent = "waiting for the first token …";
    try {
      await run(this.body, this.answer, this.view, () => this.show(), signal);
      this.complete = true;
      this.bar.style.setProperty("--part", "1");
    } catch (error) {
      if (!(error instanceof Problem) && error.name !== "AbortError") throw error;
      if (error instanceof Problem) this.foot.append(problem(error.message, error.advice));
      else this.foot.append(make("p", { class: "note" }, "You stopped it."));
    }
    this.figures.textContent = this.told();
    if (this.body.outrider.off) this.answer.off = ""; // that is what this lane is for
    this.foot.append(...footOf(this.answer));
  }

  show() {
    this.figures.textContent = this.told();
    this.bar.style.setProperty("--part", String(this.most ? this.answer.tokens.length / this.most : 0));
  }

  told() {
    const { tokens, rate } = this.answer;
    if (!tokens.length) return "no token came";
    return `${number(tokens.length)} tokens · ${seconds(this.answer.seconds)} · ${number(rate, 1)} tokens/s`;
  }
}

/** Return the outcome in a sentence or two. */
function verdict([drafted, plain], settings, stopped) {
  if (stopped) return "You stopped the race.";
  if (!drafted.complete || !plain.complete) return "The race is not complete: see below what went wrong.";
  const faster = plain.answer.seconds / drafted.answer.seconds;
  return `${same(drafted.answer, plain.answer, settings)} With drafts it was ${number(faster, 2)} times as fast.`;
}

function same(one, other, settings) {
  if (one.text === other.text) return `The texts are equal, all ${number(one.tokens.length)} tokens of them.`;
  if (!isRepeatable(settings)) {
    return "The texts differ, as they may: above temperature 0 and without a seed each is a draw of its own.";
  }
  return "The texts DIFFER. They must not: please report this with the request.";
}
