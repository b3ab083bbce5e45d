// Loads the stored history of an attempt, before the socket continues.
import { foldHistory } from "./history.js";

const PATIENCE_MS = 5000; // then the stream alone fills the page
const PATIENCE_ENDED_MS = 60_000; // an ended run has no stream

/** Fold the history into a new state. Return false without a history, or null if the request fails. */
export async function replay(state, job) {
  const snapshot = await ask(`/jobs/${job.id}/history/snapshot/?attempt=${job.attempt}`, job.finished ? PATIENCE_ENDED_MS : PATIENCE_MS);
  if (!snapshot) return snapshot;
  if (snapshot.time === null) return false;
  foldHistory(state, snapshot);
  return true;
}

/** Fetch a history. Return false without one, or null if the request fails. */
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
