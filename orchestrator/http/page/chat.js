// The chat: a conversation that grows turn by turn, each answer shown token by token while it comes.

import { Problem } from "./api.js";
import { at, make, number, problem, refill, say, seconds } from "./dom.js";
import { whyOff } from "./origins.js";
import { Answer, bodyOf, readSettings, run } from "./request.js";
import { TokenView } from "./tokens.js";

let messages = [];
let calling = null;

/** Make the chat's form work. */
export function startChat() {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const settings = readSettings();
    const text = at("chat-prompt").value;
    if (settings && text.trim() && !calling) ask(settings, text);
  });
  at("chat-stop").addEventListener("click", () => calling?.abort());
  at("chat-new").addEventListener("click", startAnew);
  at("chat-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("chat-form").requestSubmit();
  });
}

function startAnew() {
  calling?.abort();
  messages = [];
  refill(at("turns"));
  refill(at("chat-problem"));
  at("chat-empty").hidden = false;
  say(at("chat-status"), "A new conversation.");
  at("chat-prompt").focus();
}

async function ask(settings, text) {
  const asked = [...messages, { role: "user", content: text }];
  const answer = new Answer();
  const view = new TokenView(`Answer ${number((asked.length + 1) / 2)}, token by token`);
  const foot = make("div", { class: "foot" });
  at("chat-empty").hidden = true;
  refill(at("chat-problem"));
  at("turns").append(turn(text, view, foot, asked.length));
  setBusy(new AbortController());
  say(at("chat-status"), "Waiting for the first token …");
  const mine = calling;
  try {
    const onTokens = () => say(at("chat-status"), "Answering …");
    await run(bodyOf(settings, asked), answer, view, onTokens, mine.signal);
    settle(asked, answer);
    say(at("chat-status"), `The answer is complete, ${number(answer.tokens.length)} tokens.`);
  } catch (error) {
    settle(asked, answer);
    if (!(error instanceof Problem) && error.name !== "AbortError") throw error;
    onEnd(error, answer, mine);
  } finally {
    if (calling === mine) setBusy(null);
    refill(foot, ...footOf(answer));
  }
}

/** Keep what was said for the next turn; a question without any answer is asked again, not kept. */
function settle(asked, answer) {
  if (answer.text && asked.length === messages.length + 1) {
    messages = [...asked, { role: "assistant", content: answer.text }];
    at("chat-prompt").value = "";
  }
}

function onEnd(error, answer, mine) {
  if (error instanceof Problem) {
    say(at("chat-status"), answer.tokens.length ? "The answer is not complete." : "No answer came.");
    refill(at("chat-problem"), problem(error.message, error.advice));
  } else if (calling === mine) {
    say(at("chat-status"), `You stopped the answer after ${number(answer.tokens.length)} tokens.`);
  }
}

function setBusy(controller) {
  calling = controller;
  at("chat-stop").disabled = !controller;
  at("chat-form").querySelector("[type=submit]").disabled = Boolean(controller);
  if (!controller && document.activeElement === document.body) at("chat-prompt").focus();
}

function turn(text, view, foot, index) {
  return make(
    "article",
    { class: "turn", "aria-label": `Turn ${number((index + 1) / 2)}` },
    make("h2", { class: "unseen" }, "You"),
    make("p", { class: "question" }, text),
    make("h2", { class: "unseen" }, "Answer"),
    view.root,
    foot,
  );
}

/** Return how an answer went, in a sentence. */
function inWords(answer) {
  const { accepted = 0, recovered = 0, bonus = 0, plain = 0 } = answer.counts;
  if (!answer.tokens.length) return "No token came.";
  const rate = answer.rate ? `, ${number(answer.rate, 1)} tokens a second` : "";
  const kinds = `${accepted} accepted drafts, ${recovered} recovered, ${bonus} bonus, ${plain} plain`;
  return `${number(answer.tokens.length)} tokens in ${seconds(answer.seconds)}${rate}: ${kinds}.`;
}

/** Return what stands below an answer. */
export function footOf(answer) {
  const parts = [];
  if (answer.tokens.length) {
    parts.push(make("p", { class: "quiet" }, inWords(answer)));
    parts.push(make("details", {}, make("summary", {}, "As plain text"), make("p", { class: "plain-text" }, answer.text)));
  }
  if (answer.finish === "length") parts.push(make("p", { class: "quiet" }, "It ends here because of “most tokens”."));
  if (answer.off) parts.push(make("p", { class: "note" }, whyOff(answer.off)));
  for (const notice of answer.notices) parts.push(make("p", { class: "note" }, notice));
  return parts;
}
