// The full page of the step timeline, with the heat maps.
import { embedded } from "../dom.js";
import { follow, seedFromSummary } from "../fold/follow.js";
import { replay } from "../fold/replay.js";
import { showConnection } from "../job/connection.js";
import { createState } from "../store.js";
import { tracePanels } from "./panels.js";

let job = embedded("job");
let state = createState();
const show = tracePanels(() => {
  for (const place of document.querySelectorAll("[data-reading]")) delete place.dataset.reading;
});

function redraw() {
  if (job.finished) for (const place of document.querySelectorAll("[data-ended]")) place.textContent = place.dataset.ended;
  show(job, state);
}

function onConnection(name) {
  showConnection(document.getElementById("connection"), name, job.finished);
}

onConnection("reading");
await replay(state, job);
seedFromSummary(state, job);
redraw();
follow(() => ({ job, state }), {
  onJob(next) {
    job = next;
  },
  onAttempt: () => location.reload(),
  onRead(fresh) {
    state = fresh;
  },
  redraw,
  onState: onConnection,
});
