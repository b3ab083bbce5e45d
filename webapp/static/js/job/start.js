// How a run came to its first step: what each stage of the start took, as one bar.
import { el, swatch } from "../dom.js";
import { duration } from "../format.js";

const STAGES = [
  ["claim", "claimed"],
  ["spawn", "spawned"],
  ["import", "imported"],
  ["rendezvous", "met"],
  ["build", "built"],
  ["first step", "first step"],
];
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
const NOTHING_YET = 1; // only the queue is over

/** [{name, seconds, rank}]: each stage from the end of the one before to its own on the last rank. Pure. */
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
  if (parts.length <= NOTHING_YET && running !== null) parts.push({ name: "start", seconds: Math.max(0, running - placed), rank: -1 });
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
  return (job, state) => {
    const told = job.diagnosis?.start ?? [];
    const parts = told.length > 0 ? told : startParts(job.history, job.attempt, state.starts);
    const key = JSON.stringify(parts);
    if (key === drawn) return;
    drawn = key;
    const sum = parts.reduce((all, part) => all + part.seconds, 0);
    total.textContent = sum > 0 ? duration(sum) : "";
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
