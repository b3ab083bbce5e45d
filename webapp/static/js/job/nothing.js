// A run that ended without data to draw: the page leaves out the empty panels.
import { BAD } from "./ending.js";

/**
 * The stage that an attempt did not reach: "queued" while the job waits, "ran" if no host got the job, "measured" if no
 * rank sent data, "sent" if no rank ran a collective or a step, else "". `hasHistory` is whether the server has data of the
 * attempt, or null if that is unknown. Pure.
 * @param {Job} job
 * @param {any} state
 * @param {boolean | null} hasHistory
 */
export function neverDid(job, state, hasHistory) {
  if (job.status === "queued") return "queued";
  if (!job.finished || (job.status === "succeeded" && !hasHistory)) return "";
  if (!wasPlaced(job)) return "ran";
  if (hasHistory === null || hasSent(job, state)) return "";
  return [...state.gauges.keys()].some((rank) => rank >= 0) ? "sent" : "measured"; // keys of hosts are negative
}

/**
 * Whether a host got the current attempt.
 * @param {Job} job
 */
export function wasPlaced({ history, attempt }) {
  return history.some((change) => change.attempt === attempt && change.status === "starting");
}

function hasSent(job, state) {
  const stores = [state.steps, state.evals, state.verdicts, state.checkpoints, state.dryRuns];
  if (stores.some((items) => items.size > 0) || state.progress || job.exit?.summary?.lab) return true;
  return [...state.ranks.values()].some((rank) => rank.cells.size > 0);
}

/** Describe the missing data of a run. Pure. */
export function nothingWords(never, status, lines) {
  const ended = status[0].toUpperCase() + status.slice(1);
  if (never === "ran") return `${ended} before it started. Nothing to show.`;
  const what = status === "succeeded" ? "The job succeeded without a collective or a step." : `${ended} before the first collective or step.`;
  if (never === "sent") return `${what} See ${lines > 0 ? "Memory and Logs" : "Memory"}.`;
  return `${what} ${lines > 0 ? "See Logs." : "Nothing to show."}`;
}

/** `main` leaves out panels by their data-needs (css/job/first.css). `line` explains why, except after a failure. */
export function nothingView(main, line) {
  const hasTraffic = main.querySelector("#traffic") !== null; // other jobs succeed without collectives
  return (job, state, hasHistory) => {
    const never = job.status === "succeeded" && !hasTraffic ? "" : neverDid(job, state, hasHistory);
    main.dataset.nothing = never;
    line.hidden = ["", "queued"].includes(never) || BAD.has(job.status);
    const words = line.hidden ? "" : nothingWords(never, job.status, state.logs.size);
    if (line.textContent !== words) line.textContent = words;
    return never;
  };
}
