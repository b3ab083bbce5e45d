// How a job ended, in one sentence. Pure.
import { upright } from "../upright.js";

export const BAD = new Set(["failed", "lost"]);
const MAX_REASON = 160; // characters
const capital = (word) => word[0].toUpperCase() + word.slice(1);

/** "Failed: boom (rank 1, exit code 1)", or "Cancelled on request". Facts that the reason contains are not repeated. */
export function endingWords(job) {
  const { exit } = job;
  const reason = exit?.reason || job.history.at(-1)?.reason || "the run ended without a report";
  if (!BAD.has(job.status)) return upright(reason.startsWith(job.status) ? capital(reason) : `${capital(job.status)}: ${reason}`);
  const facts = [];
  if (exit?.rank !== null && exit?.rank !== undefined) facts.push(`rank ${exit.rank}`);
  if (exit?.signal) facts.push(exit.signal);
  else if (exit?.exit_code) facts.push(`exit code ${exit.exit_code}`);
  const added = facts.filter((fact) => !new RegExp(`\\b${fact}\\b`, "i").test(reason));
  const short = reason.length > MAX_REASON ? `${reason.slice(0, MAX_REASON - 1)}…` : reason;
  return upright(`${capital(job.status)}: ${short}${added.length > 0 ? ` (${added.join(", ")})` : ""}`);
}
