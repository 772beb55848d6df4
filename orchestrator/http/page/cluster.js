// The cluster as it is now: workers, sessions, acceptance, rounds; told by the server once a second while it is shown.

import { Problem, stream } from "./api.js";
import { at, make, number, problem, refill, say, table } from "./dom.js";
import { whyOff } from "./origins.js";
import { drawRounds } from "./rounds.js";

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15000;
const ROLES = { verify: "verifier", draft: "draft worker", orchestrate: "orchestrator" };
let watching = null;
let paused = false;
let seenMs = 0;

/** Watch the cluster from now on, or no longer. */
export function showCluster(wanted) {
  watching?.abort();
  watching = null;
  if (wanted && !paused) watch((watching = new AbortController()));
}

at("cluster-pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  showCluster(true);
  say(at("cluster-status"), paused ? "Paused: what you see stays as it is." : "Going on.");
});
setInterval(tellAge, 1000);

/** Watch until told not to, with growing pauses where the server cannot be reached. */
async function watch(mine) {
  let pause = FIRST_PAUSE_MS;
  say(at("cluster-status"), "Looking at the cluster …");
  while (!mine.signal.aborted) {
    try {
      for await (const snapshot of stream("cluster/events", { signal: mine.signal })) {
        if (mine.signal.aborted) return;
        show(snapshot);
        pause = FIRST_PAUSE_MS;
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem)) throw error;
      say(at("cluster-status"), "What you see is not up to date.");
      tellProblem(error.message, error.advice || "It is tried again by itself.");
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(LONGEST_PAUSE_MS, 2 * pause);
  }
}

function tellProblem(text, advice) {
  const place = at("cluster-problem");
  if (place.textContent !== text + advice) refill(place, ...(text ? [problem(text, advice)] : []));
}

function tellAge() {
  const age = Math.round((performance.now() - seenMs) / 1000);
  say(at("cluster-age"), !seenMs ? "" : age < 3 ? "up to date" : `as of ${number(age)} seconds ago`);
}

function show(snapshot) {
  seenMs = performance.now();
  say(at("cluster-status"), summary(snapshot));
  tellProblem(snapshot.problem, "");
  refill(at("cluster-off"), ...snapshot.off.map(offNote));
  refill(at("workers"), workers(snapshot.workers));
  refill(at("sessions"), sessions(snapshot));
  refill(at("acceptance"), acceptance(snapshot.acceptance));
  drawRounds(at("rounds"), snapshot.timelines);
  tellAge();
}

/** Return a sentence that changes only when workers come or go: it is a live region. */
function summary({ model, workers: all }) {
  const count = (role) => {
    const ready = all.filter((worker) => worker.role === role && worker.state === "ready").length;
    return `${number(ready)} ${ROLES[role]}${ready === 1 ? "" : "s"}`;
  };
  return `Model ${model}. Ready: ${count("verify")}, ${count("draft")}.`;
}

function offNote({ reason, sessions: count }) {
  const concerned = count ? ` It concerns ${number(count)} of the sessions below.` : "";
  return make("p", { class: "note" }, `Speculation is off: ${whyOff(reason)}${concerned}`);
}

function workers(all) {
  if (!all.length) return make("p", { class: "quiet" }, "No worker is known.");
  const rows = all.map((worker) => [
    worker.id,
    ROLES[worker.role] ?? worker.role,
    worker.state,
    share(worker.load, worker.capacity),
    worker.label || worker.drafters.join(", ") || worker.exactness || "–",
  ]);
  return table("Workers of the cluster", ["Name", "Role", "State", "Sessions", "What"], rows);
}

function share(load, capacity) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--part", String(capacity ? Math.min(1, load / capacity) : 0));
  return make("span", { class: "share" }, `${number(load)} of ${number(capacity)}`, bar);
}

function sessions({ sessions: own, num_sessions: all }) {
  const others = all - own.length;
  const hidden = others > 0 ? [make("p", { class: "quiet" }, `${number(others)} more run, which are not shown here.`)] : [];
  if (!own.length) return make("div", {}, make("p", { class: "quiet" }, "No session runs at this orchestrator."), ...hidden);
  const rows = own.map((session) => [
    session.id,
    number(session.tokens),
    session.tokens_per_second ? number(session.tokens_per_second, 1) : "–",
    session.tested ? `${number(session.accepted)} of ${number(session.tested)}` : "–",
    session.draft_worker || "–",
    session.off ? whyOff(session.off) : session.drafter || "on",
  ]);
  const heads = ["Session", "Tokens", "Tokens/s", "Accepted", "Draft worker", "Speculation"];
  return make("div", {}, table("Sessions that run", heads, rows), ...hidden);
}

function acceptance(drafters) {
  if (!drafters.length) return make("p", { class: "quiet" }, "No draft was tested yet.");
  const longest = Math.max(...drafters.map(({ positions }) => positions.length));
  const heads = ["Drafter", ...Array.from({ length: longest }, (_, index) => String(index + 1))];
  const rows = drafters.map(({ drafter, positions }) => [
    drafter || "unnamed",
    ...Array.from({ length: longest }, (_, index) => accepted(positions[index])),
  ]);
  const grid = table("Share of drafts accepted, by drafter and position", heads, rows);
  grid.classList.add("grid-table");
  return make("div", { class: "wide-table", tabindex: 0, role: "group", "aria-label": "Acceptance, scrolls sideways" }, grid);
}

function accepted(position) {
  if (!position?.tested) return "–";
  const part = position.accepted / position.tested;
  const cell = make("span", { class: "heat", title: `${position.accepted} of ${position.tested}` }, `${number(100 * part)} %`);
  cell.style.setProperty("--part", String(part));
  return cell;
}
