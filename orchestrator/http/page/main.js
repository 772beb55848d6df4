// Puts the page together: views by the address's fragment, the key, the lists of models and drafters, the legend.

import { getJson, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { at, make, refill } from "./dom.js";
import { ORIGINS } from "./origins.js";
import { startRace } from "./race.js";

const VIEWS = { chat: "Chat", race: "Race", cluster: "Cluster" };
let shown = "";

/** Show the view that the address names; by a link, the focus goes to its title. */
function showView(byLink) {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : shown || "chat";
  if (name === shown) return;
  shown = name;
  for (const view of Object.keys(VIEWS)) at(`view-${view}`).hidden = view !== name;
  for (const part of ["settings", "legend"]) at(part).hidden = name === "cluster";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[name]} · Outrider`;
  showCluster(name === "cluster");
  if (byLink) at(`${name}-title`).focus();
}

function showLegend() {
  const entries = Object.entries(ORIGINS).map(([kind, { letter, name, means }]) =>
    make(
      "div",
      {},
      make("dt", {}, make("span", { class: `token ${letter}`, "data-kind": kind }, name), ` ${letter}`),
      make("dd", {}, means),
    ),
  );
  refill(at("legend-list"), ...entries);
  at("letters").addEventListener("change", (event) => document.body.classList.toggle("letters", event.target.checked));
}

/** Fill the lists of models and drafters; without them the server's defaults are all there is to choose. */
async function listModels() {
  let models;
  try {
    models = (await getJson("v1/models")).data;
  } catch {
    return; // whoever asks something is told what is wrong
  }
  const drafters = new Set(models.flatMap((model) => model.outrider?.drafters ?? []));
  fill(at("set-model"), models.map((model) => model.id));
  fill(at("set-drafter"), [...drafters]);
}

function fill(list, names) {
  const kept = list.value;
  const options = names.map((name) => make("option", { value: name }, name));
  refill(list, list.options[0], ...options);
  list.value = names.includes(kept) ? kept : "";
}

at("access").addEventListener("submit", (event) => event.preventDefault());
at("settings-form").addEventListener("submit", (event) => event.preventDefault());
at("key").addEventListener("change", (event) => {
  useKey(event.target.value);
  listModels();
  if (shown === "cluster") showCluster(true);
});
at("key").addEventListener("input", (event) => useKey(event.target.value));
window.addEventListener("hashchange", () => showView(true));
showLegend();
startChat();
startRace();
showView(false);
listModels();
