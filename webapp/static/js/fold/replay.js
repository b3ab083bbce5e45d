// What the server kept of an attempt comes first; the socket goes on from there.
import { foldHistory } from "./history.js";

const PATIENCE_MS = 5000; // then the stream tells what it can
const PATIENCE_ENDED_MS = 60_000; // nothing else tells of a run that has ended

/** Folds it into a fresh state. False where nothing was kept, null where it cannot be had now. */
export async function replay(state, job) {
  const kept = await ask(`/jobs/${job.id}/history/snapshot/?attempt=${job.attempt}`, job.finished ? PATIENCE_ENDED_MS : PATIENCE_MS);
  if (!kept) return kept;
  if (kept.time === null) return false;
  foldHistory(state, kept);
  return true;
}

/** False where there is none, null where nobody knows. */
async function ask(address, patience) {
  try {
    const answer = await fetch(address, { signal: AbortSignal.timeout(patience) });
    if (answer.status === 204) return false;
    return answer.status === 200 ? await answer.json() : null;
  } catch (error) {
    console.info("no history:", error.message);
    return null;
  }
}
