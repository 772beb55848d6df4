// The last rounds of a generation on a line of time: one row each for draft, network, verify and commit, and the same as
// a table.

import { draw, make, number, refill, table } from "./dom.js";

const LANES = [
  ["draft", "draft"],
  ["network", "network"],
  ["verify", "verify"],
  ["commit", "commit"],
];
const WIDTH = 1000;
const LANE = 26;
const LEFT = 90;
const SHOWN = 12;
let chosen = "";
let opened = false;

/** Draw the rounds of one of the generations, with a list to choose by where there are several. */
export function drawRounds(place, timelines) {
  if (place.contains(document.activeElement)) return; // whoever is choosing or reading is not disturbed
  if (!timelines.length) {
    refill(place, make("p", { class: "quiet" }, "No generation has run here yet. Ask something in the chat."));
    return;
  }
  const timeline = timelines.find(({ session }) => session === chosen) ?? timelines[0];
  const rounds = timeline.rounds.slice(-SHOWN);
  refill(place, choice(timelines, timeline, place), figure(timeline, rounds), asTable(rounds));
}

function choice(timelines, timeline, place) {
  const list = make("select", { id: "rounds-session" });
  for (const { session, running } of timelines) {
    list.append(make("option", { value: session }, `${session} (${running ? "runs" : "is over"})`));
  }
  list.value = timeline.session;
  list.addEventListener("change", () => {
    chosen = list.value;
    list.blur();
    drawRounds(place, timelines);
  });
  return make("p", {}, make("label", { for: "rounds-session" }, "Session "), list);
}

function figure(timeline, rounds) {
  const spans = rounds.map(spansOf);
  const starts = spans.map((each) => Math.min(...Object.values(each).map(([start]) => start)));
  const ends = spans.map((each) => Math.max(...Object.values(each).map(([, end]) => end)));
  const from = Math.min(...starts);
  const scale = (WIDTH - LEFT - 10) / Math.max(1, Math.max(...ends) - from);
  const x = (ms) => LEFT + (ms - from) * scale;
  const title = `The last ${number(rounds.length)} rounds, ${number(Math.max(...ends) - from)} milliseconds in all`;
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${LANE * LANES.length + 24}`, role: "img", "aria-label": title, class: "rounds" });
  LANES.forEach(([name, shown], row) => {
    const y = row * LANE;
    picture.append(draw("text", { x: 0, y: y + 17 }, shown), draw("line", { x1: LEFT, x2: WIDTH, y1: y + LANE, y2: y + LANE }));
    for (const each of spans) {
      if (each[name]) picture.append(bar(name, x(each[name][0]), x(each[name][1]), y));
    }
  });
  const ticks = [draw("text", { x: LEFT, y: LANE * LANES.length + 18 }, "0 ms"), endTick(Math.max(...ends) - from)];
  picture.append(...ticks);
  return make("figure", {}, picture, make("figcaption", { class: "quiet" }, caption(timeline)));
}

function endTick(length) {
  return draw("text", { x: WIDTH, y: LANE * LANES.length + 18, "text-anchor": "end" }, `${number(length)} ms`);
}

function bar(name, from, to, y) {
  return draw("rect", { class: name, x: from, y: y + 4, width: Math.max(2, to - from), height: LANE - 8, rx: 2 });
}

/**
 * Return where each part of a round lies, in milliseconds before now, as negative numbers. The verdict's arrival is
 * known; from there the parts are laid out backwards, and the append forwards.
 */
function spansOf(round) {
  const arrived = -round.ago_ms;
  const trip = (round.network_ms ?? 0) / 2;
  const verified = arrived - trip;
  const began = verified - round.verify_ms;
  const came = began - round.queue_ms;
  const sent = came - trip;
  const spans = { verify: [began, verified] };
  if (round.draft_ms) spans.draft = [sent - round.draft_ms, sent];
  if (round.network_ms !== null) spans.network = [sent, came];
  if (round.commit_ms !== null) spans.commit = [arrived, arrived + round.commit_ms];
  return spans;
}

function caption({ running }) {
  const state = running ? "It runs." : "It is over.";
  return (
    `${state} Verify and commit are measured in each round. Draft is the drafter’s own pace times the tokens tested; ` +
    "network is measured where a round begins a new chain of guesses, and drawn on the way to the verifier."
  );
}

function asTable(rounds) {
  const heads = ["Ago", "Tokens", "Accepted", "Draft", "Network", "Queue", "Verify", "Commit"];
  const ms = (value) => (value === null ? "–" : number(value, 1));
  const rows = rounds.map((round) => [
    `${number(round.ago_ms)} ms`,
    number(round.tokens),
    round.tested ? `${number(round.accepted)} of ${number(round.tested)}` : "–",
    ms(round.draft_ms),
    ms(round.network_ms),
    ms(round.queue_ms),
    ms(round.verify_ms),
    ms(round.commit_ms),
  ]);
  const details = make(
    "details",
    {},
    make("summary", {}, "As a table, in milliseconds"),
    make("div", { class: "wide-table", tabindex: 0, role: "group", "aria-label": "Rounds, scrolls sideways" }, table("The last rounds, in milliseconds", heads, rows.reverse())),
  );
  details.open = opened;
  details.addEventListener("toggle", () => (opened = details.open));
  return details;
}
