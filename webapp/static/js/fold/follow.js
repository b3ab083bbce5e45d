// A page follows its job: the socket goes on where the history ended, and the history tells what the socket missed.
import { connect } from "../socket.js";
import { VERSION, createState, expectGap, foldBatch, foldSummary, resumeFrom } from "../store.js";
import { replay } from "./replay.js";

/** What a job told as it ended, where nothing else tells of it. */
export function seedFromSummary(state, job) {
  if (job.exit?.summary && state.time === null) foldSummary(state, job.exit.summary);
}

/**
 * `now()` gives {job, state} of the page. `onJob(job)` gets each that is told, and `onAttempt()` is called instead where it
 * is of another; `onRead(state, kept)` gets a state made of the history anew; `redraw` and `onState` as `connect` has it,
 * which is told "outdated" too, at the end: what the board sends is newer than this page.
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
          onAttempt(); // of another attempt nothing here is true
          return;
        }
        onJob(next);
        seedFromSummary(now().state, next);
        redraw();
        if (again && next.finished) readAgain(); // its stream may be gone, which is no gap
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

  /** What was missed is in the history: the page is made of that, as if it were opened now. */
  async function readAgain() {
    socket.close();
    const fresh = createState();
    const { job } = now();
    const kept = await replay(fresh, job);
    if (kept || (kept === false && job.exit?.summary)) onRead(fresh, kept);
    seedFromSummary(now().state, job);
    redraw();
    open();
  }

  open();
}
