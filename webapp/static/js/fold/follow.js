// Follows a job: the socket continues after the history, and the history fills gaps of the socket.
import { connect } from "../socket.js";
import { VERSION, createState, expectGap, foldBatch, foldSummary, resumeFrom } from "../store.js";
import { replay } from "./replay.js";

/** Use the summary of an ended job if there is no other data. */
export function seedFromSummary(state, job) {
  if (job.exit?.summary && state.time === null) foldSummary(state, job.exit.summary);
}

/**
 * Follow a job. `now()` returns {job, state} of the page. `onJob(job)` receives each change, and `onAttempt()` is called
 * for a new attempt. `onRead(state, hasHistory)` receives a new state from the history. `onState` receives the state of the
 * connection, and "outdated" if the board sends a newer format than this page can read.
 */
export function follow(now, { onJob, onAttempt, onRead, redraw, onState }) {
  let socket = null;
  let outdated = false;

  function open() {
    if (outdated) return;
    socket = connect(`/ws/jobs/${now().job.id}/`, {
      resume: () => ({ after: resumeFrom(now().state), attempt: now().job.attempt }),
      onJob(next, again) {
        if (next.attempt > now().job.attempt) {
          onAttempt(); // the data of the page belongs to the old attempt
          return;
        }
        onJob(next);
        seedFromSummary(now().state, next);
        redraw();
        if (again && next.finished) readAgain(); // a finished job may have no stream, which is not a gap
      },
      onGap(node, again) {
        expectGap(now().state, node);
        if (again) readAgain();
      },
      onBatch(id, batch, node) {
        if (outdated || batch.v > VERSION) {
          endOutdated();
          return;
        }
        foldBatch(now().state, id, batch, node);
        redraw();
      },
      onState,
    });
  }

  function endOutdated() {
    outdated = true;
    socket.close();
    onState("outdated");
  }

  /** Rebuild the state from the history, which has the missed data. */
  async function readAgain() {
    socket.close();
    const fresh = createState();
    const { job } = now();
    const replayed = await replay(fresh, job);
    if (replayed || (replayed === false && job.exit?.summary)) onRead(fresh, replayed);
    seedFromSummary(now().state, job);
    redraw();
    open();
  }

  open();
}
