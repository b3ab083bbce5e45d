// The reference check of a run without one: its state, live, and the button that starts the check.
import { embedded, write } from "../dom.js";

const VERDICTS = ["equal", "apart"];
const LOOK_S = 10; // a longer wait would skip states
const AWAY_MS = 5000;
const GONE = [401, 403, 404];

const check = embedded("check-data");
let words = null; // describes a proof, depends on the precision
let followed = false;

/** Show the check. `one` is the result of the run itself, and `describeProof` describes a proof. */
export function showCheck(place, one, describeProof) {
  words = describeProof;
  place.hidden = one.words !== "not checked" || one.waits;
  if (!check) return;
  show(place);
  if (followed) return;
  followed = true;
  follow(place);
}

function show(place) {
  const found = VERDICTS.includes(check.proof?.one_process.state);
  const form = place.querySelector("form");
  if (form) form.hidden = !check.finished || found;
  const ended = found ? words(check.proof) : `no result (${check.status})`;
  write(place.querySelector("[data-check]"), check.finished ? ended : check.status);
}

async function follow(place) {
  while (!check.finished) {
    const answer = await fetch(`/api/v1/jobs/${check.id}/wait?for=finished&timeout=${LOOK_S}`).catch(() => null);
    if (answer && GONE.includes(answer.status)) return;
    if (!answer?.ok) {
      await new Promise((resolve) => setTimeout(resolve, AWAY_MS));
      continue;
    }
    const { job } = await answer.json();
    Object.assign(check, { status: job.status, finished: job.finished, proof: job.exit?.summary?.proof ?? null });
    show(place);
  }
}
