// The full page of a job's steps: the same telemetry as the job page, and only these panels.
import { embedded } from "../dom.js";
import { replay } from "../fold/replay.js";
import { connect } from "../socket.js";
import { createState, expectGap, foldBatch, foldSummary, resumeFrom } from "../store.js";
import { tracePanels } from "./panels.js";

let job = embedded("job");
const state = createState();
const show = tracePanels(() => {
  for (const place of document.querySelectorAll("[data-reading]")) delete place.dataset.reading;
});

function redraw() {
  if (job.finished) for (const place of document.querySelectorAll("[data-ended]")) place.textContent = place.dataset.ended;
  show(job, state);
}

if (!(await replay(state, job)) && job.exit?.summary) foldSummary(state, job.exit.summary);
redraw();
connect(`/ws/jobs/${job.id}/`, {
  resume: () => ({ after: resumeFrom(state), attempt: job.attempt }),
  onJob(next) {
    if (next.attempt > job.attempt) location.reload(); // of another attempt nothing here is true
    job = next;
    redraw();
  },
  onGap: (node) => expectGap(state, node),
  onBatch(id, batch, node) {
    foldBatch(state, id, batch, node);
    redraw();
  },
  onState() {},
});
