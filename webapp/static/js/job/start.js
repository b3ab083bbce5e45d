// The start of a run: the duration of each stage, and the stage that runs now.
import { el, swatch } from "../dom.js";
import { duration, integer } from "../format.js";

const STAGES = [
  // name, the event that ends the stage, and its name while it runs
  ["claim", "claimed", "Waiting for the host"],
  ["spawn", "spawned", "Starting processes"],
  ["import", "imported", "Importing PyTorch"],
  ["rendezvous", "met", "Connecting ranks (rendezvous)"],
  ["build", "built", "Building the model"],
  ["first step", "first step", "Running the first step"],
];
const HOST_STAGES = new Set(["claimed", "spawned"]);
const LAST_OF_A_SCRIPT = "imported";
const TOKENS = {
  queue: "--part-bubble",
  claim: "--series-14",
  spawn: "--series-8",
  import: "--series-9",
  rendezvous: "--series-3",
  build: "--series-6",
  "first step": "--series-2",
  start: "--series-8",
};
const ONLY_QUEUE = 1; // parts

/** Seconds of the board's clock since 1970. The page was rendered at `data-now`. */
export function boardClock(place) {
  const [navigation] = /** @type {PerformanceNavigationTiming[]} */ (performance.getEntriesByType("navigation"));
  const rendered = Number(place.dataset.now);
  return () => (rendered > 0 ? rendered + (performance.now() - (navigation?.responseStart ?? 0)) / 1000 : Date.now() / 1000);
}

/**
 * "Importing PyTorch, 45 s", or "" if no start is in progress. `now`: the time on the board's clock, seconds. Pure.
 * @param {Job} job
 * @param {any} state
 * @param {number} now
 */
export function startPhase(job, state, now) {
  if (!["starting", "running"].includes(job.status) || state.progress) return "";
  const placed = job.history.find((change) => change.attempt === job.attempt && change.status === "starting");
  if (!placed) return "";
  const trains = (job.spec.kind ?? "train") === "train";
  if (!trains && [...state.ranks.values()].some((rank) => rank.cells.size > 0)) return "";
  let since = Date.parse(placed.at) / 1000;
  const known = new Set([...state.starts.values()].flatMap((stages) => Object.keys(stages)));
  for (const [at, [, stage, words]] of STAGES.entries()) {
    const isSkipped = !known.has(stage) && STAGES.slice(at + 1).some(([, later]) => known.has(later)); // as by Slurm
    if (isSkipped) continue;
    const all = HOST_STAGES.has(stage) ? Math.max(1, job.members.length) : job.world_size;
    const ended = [...state.starts.values()].filter((stages) => stages[stage] !== undefined);
    if (ended.length < all) return `${words}, ${integer(Math.max(0, Math.round(now - since)))} s`;
    since = Math.max(since, /** @type {{time: number}} */ (latest(state.starts, stage)).time);
    if (!trains && stage === LAST_OF_A_SCRIPT) return "";
  }
  return "";
}

/** [{name, seconds, rank}]: the stages of a start. A stage ends when its last rank ends it. Pure. */
export function startParts(history, attempt, starts) {
  const at = (status) => {
    const change = history.find((one) => one.attempt === attempt && one.status === status);
    return change ? Date.parse(change.at) / 1000 : null;
  };
  const [queued, placed, running] = [at("queued"), at("starting"), at("running")];
  if (placed === null) return [];
  const parts = queued === null ? [] : [{ name: "queue", seconds: Math.max(0, placed - queued), rank: -1 }];
  let before = placed;
  for (const [name, stage] of STAGES) {
    const last = latest(starts, stage);
    if (last === null) continue;
    parts.push({ name, seconds: Math.max(0, last.time - before), rank: last.rank });
    before = Math.max(before, last.time);
  }
  if (parts.length <= ONLY_QUEUE && running !== null) parts.push({ name: "start", seconds: Math.max(0, running - placed), rank: -1 });
  return parts;
}

function latest(starts, stage) {
  let last = null;
  for (const [rank, stages] of starts) {
    if (stages[stage] !== undefined && (last === null || stages[stage] > last.time)) last = { time: stages[stage], rank };
  }
  return last;
}

export function startBar(section) {
  const [lane, figures, total] = ["[data-bars]", "[data-figures]", "[data-total]"].map((name) => section.querySelector(name));
  let drawn = "";
  return (job, state, phase) => {
    const stored = job.diagnosis?.start ?? [];
    const parts = stored.length > 0 ? stored : startParts(job.history, job.attempt, state.starts);
    const key = JSON.stringify([parts, phase]);
    if (key === drawn) return;
    drawn = key;
    const sum = parts.reduce((all, part) => all + part.seconds, 0);
    total.textContent = phase || (sum > 0 ? duration(sum) : "");
    lane.replaceChildren(...parts.filter((part) => part.seconds > 0).map((part) => segment(part, sum)));
    figures.replaceChildren(...parts.map(figure));
  };
}

function segment(part, sum) {
  const span = el("span", { title: words(part) });
  span.dataset.part = part.name;
  span.style.width = `${(100 * part.seconds) / sum}%`;
  span.style.setProperty("--swatch", `var(${TOKENS[part.name]})`);
  return span;
}

const words = (part) => `${part.name}: ${duration(part.seconds)}${part.rank >= 0 ? `, rank ${part.rank} last` : ""}`;

function figure(part) {
  return el("div", { title: words(part) }, el("dt", {}, swatch(TOKENS[part.name]), part.name), el("dd", {}, el("b", {}, duration(part.seconds))));
}
