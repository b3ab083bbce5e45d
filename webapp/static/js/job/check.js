// The reference check of a run without one: its state, live, and the button that starts the check.
import { embedded, write } from "../dom.js";

const VERDICTS = ["equal", "apart"];
const LOOK_S = 10; // a longer wait would skip states
const AWAY_MS = 5000;
const GONE = [401, 403, 404];

const told = embedded("check-told");
let words = null; // describes a proof, depends on the precision
let followed = false;

/** Show the check. `one` is the result of the run itself, and `wordsOf` describes a proof. */
export function showCheck(place, one, wordsOf) {
  words = wordsOf;
  place.hidden = one.words !== "not checked" || one.waits;
  if (!told) return;
  show(place);
  if (followed) return;
  followed = true;
  follow(place);
}

function show(place) {
  const found = VERDICTS.includes(told.proof?.one_process.state);
  const form = place.querySelector("form");
  if (form) form.hidden = !told.finished || found;
  const ended = found ? words(told.proof) : `no result (${told.status})`;
  write(place.querySelector("[data-said]"), told.finished ? ended : told.status);
}

async function follow(place) {
  while (!told.finished) {
    const answer = await fetch(`/api/v1/jobs/${told.id}/wait?for=finished&timeout=${LOOK_S}`).catch(() => null);
    if (answer && GONE.includes(answer.status)) return;
    if (!answer?.ok) {
      await new Promise((resolve) => setTimeout(resolve, AWAY_MS));
      continue;
    }
    const { job } = await answer.json();
    Object.assign(told, { status: job.status, finished: job.finished, proof: job.exit?.summary?.proof ?? null });
    show(place);
  }
}
