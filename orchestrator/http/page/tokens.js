// An answer, token by token: coloured and underlined by origin, and with a panel about the token under the pointer or
// the cursor. One stop of the Tab key leads to the text; within it the arrow keys go from token to token.

import { make, number, refill } from "./dom.js";
import { originOf } from "./origins.js";

let views = 0;

/** The view of one answer; `root` is the element to place. */
export class TokenView {
  #tokens = [];
  #name = `answer-${++views}`;
  #active = -1;

  constructor(label) {
    this.list = make("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": label, id: this.#name });
    this.list.setAttribute("aria-orientation", "horizontal");
    this.list.hidden = true;
    this.panel = make("div", { class: "panel" });
    this.panel.hidden = true;
    this.root = make("div", { class: "answer" }, this.list, this.panel);
    this.list.addEventListener("pointerover", (event) => this.#pointed(event));
    this.list.addEventListener("click", (event) => this.#pointed(event));
    this.list.addEventListener("keydown", (event) => this.#pressed(event));
    this.list.addEventListener("focus", () => this.#show(Math.max(0, this.#active)));
  }

  /** Add the tokens of a chunk, each {id, text, kind, position, logprob, top}; a tail belongs to the last one. */
  add(tokens, tail = "") {
    const last = this.#tokens.at(-1);
    if (tail && last) {
      last.text += tail;
      this.list.lastElementChild.replaceWith(this.#element(last, this.#tokens.length - 1));
    }
    this.list.append(...tokens.map((token, index) => this.#element(token, this.#tokens.length + index)));
    this.#tokens.push(...tokens);
    this.list.hidden = !this.#tokens.length;
  }

  #element(token, index) {
    const origin = originOf(token.kind);
    const attributes = {
      id: `${this.#name}-${index}`,
      class: token.text ? `token ${origin.letter}` : `token empty ${origin.letter}`,
      role: "option",
      "aria-selected": "false",
      "aria-label": label(token),
      "data-letter": origin.letter,
      "data-index": index,
      "data-kind": token.kind ?? "",
    };
    return make("span", attributes, token.text);
  }

  #pointed(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.#show(Number(index));
  }

  #pressed(event) {
    const last = this.#tokens.length - 1;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -last, End: last };
    const step = steps[event.key];
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.#show(Math.min(last, Math.max(0, this.#active + step)));
  }

  #show(index) {
    const token = this.#tokens[index];
    if (!token) return;
    this.list.children[this.#active]?.setAttribute("aria-selected", "false");
    this.#active = index;
    const element = this.list.children[index];
    element.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", element.id);
    if (document.activeElement === this.list) element.scrollIntoView({ block: "nearest" });
    refill(this.panel, ...about(token, index));
    this.panel.hidden = false;
  }
}

/** Return what a screen reader says of a token. */
function label(token) {
  const shown = token.text.trim() ? token.text : token.text ? "white space" : "no text of its own";
  const chance = token.logprob === null ? "" : `, ${percent(token.logprob)}`;
  return `${shown}, ${originOf(token.kind).name}${chance}`;
}

function about(token, index) {
  const origin = originOf(token.kind);
  const facts = [
    ["Token", make("code", {}, JSON.stringify(token.text))],
    ["Origin", `${origin.letter}: ${origin.name}${origin.means ? `, ${origin.means}` : ""}`],
    ["Probability", token.logprob === null ? "not told" : percent(token.logprob)],
    ["Place", `token ${number(index + 1)} of the answer, position ${number(token.position)} of the session`],
  ];
  if (token.id !== null) facts.push(["Id", String(token.id)]);
  const rows = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return [make("dl", {}, ...rows), ...(token.top.length ? [alternatives(token)] : [])];
}

/** Return the likeliest tokens at a place, as bars with their numbers. */
function alternatives(token) {
  const rows = token.top.map(({ text, logprob }) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--part", String(Math.exp(logprob)));
    return make("li", {}, make("code", {}, JSON.stringify(text)), make("span", {}, percent(logprob)), bar);
  });
  return make("div", {}, make("p", { class: "quiet" }, "The likeliest here:"), make("ol", { class: "likeliest" }, ...rows));
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value > 0 && value < 0.01 ? "below 0.01 %" : `${number(value, value < 10 ? 2 : 1)} %`;
}
