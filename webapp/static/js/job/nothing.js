// An attempt that ended before it had anything to draw: its page says so and leaves out the panels that would be empty.

/**
 * What an ended attempt never did: "ran", where no host was given it; "measured", where no rank told anything; "sent",
 * where none came to a collective or a step; "" of any other. `kept`: whether the server kept anything of it, null while
 * that is not known. Pure.
 */
export function neverDid(job, state, kept) {
  if (!job.finished || (job.status === "succeeded" && !kept)) return "";
  const placed = job.history.some((change) => change.attempt === job.attempt && change.status === "starting");
  if (!placed) return "ran";
  if (kept === null || hasSent(job, state)) return "";
  return [...state.gauges.keys()].some((rank) => rank >= 0) ? "sent" : "measured"; // a host's own are below zero
}

function hasSent(job, state) {
  const told = [state.steps, state.evals, state.verdicts, state.checkpoints, state.dryRuns];
  if (told.some((items) => items.size > 0) || state.progress || job.exit?.summary?.lab) return true;
  return [...state.ranks.values()].some((rank) => rank.cells.size > 0);
}

/** Pure. */
export function nothingWords(never, status, lines) {
  const ended = status[0].toUpperCase() + status.slice(1);
  if (never === "ran") return `${ended} before it started: nothing ran, so there is no step, no traffic and no log to show.`;
  const what = status === "succeeded" ? `${ended}; no rank made a collective or a step` : `${ended} before any rank came to a collective or a step`;
  if (never === "sent") return `${what}: what its ranks held${lines > 0 ? ", and its log, are" : " is"} what there is to see.`;
  return `${what}: ${lines > 0 ? "its log is what there is to see." : "there is nothing to draw."}`;
}

/** Shows it on the page: `main` leaves out panels by what they need (css/job/first.css), `line` says why. */
export function nothingView(main, line) {
  const counts = main.querySelector("#traffic") !== null; // what else succeeds without a collective was to make none
  return (job, state, kept) => {
    const never = job.status === "succeeded" && !counts ? "" : neverDid(job, state, kept);
    main.dataset.nothing = never;
    line.hidden = never === "";
    const words = never && nothingWords(never, job.status, state.logs.size);
    if (line.textContent !== words) line.textContent = words;
    return never;
  };
}
