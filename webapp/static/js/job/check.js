// A run that one process did not compute: what a check of it found, live, and the button that makes one.
import { embedded, write } from "../dom.js";

const VERDICTS = ["equal", "apart"];
const LOOK_S = 10; // a longer wait would tell of no state in between
const AWAY_MS = 5000;
const GONE = [401, 403, 404];

const told = embedded("check-told");
let words = null; // of a proof; the run's precision says how
let followed = false;

/** `one`: the run's own proof beside one process; `wordsOf` says in words what a proof found. */
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
  const ended = found ? words(told.proof) : `${told.status} without a verdict`;
  write(place.querySelector("[data-said]"), told.finished ? ended : told.status);
}

async function follow(place) {
  while (!told.finished) {
    const answer = await fetch(`/api/v1/jobs/${told.id}/wait?for=finished&timeout=${LOOK_S}`).catch(() => null);
    if (GONE.includes(answer?.status)) return;
    if (!answer?.ok) {
      await new Promise((resolve) => setTimeout(resolve, AWAY_MS));
      continue;
    }
    const { job } = await answer.json();
    Object.assign(told, { status: job.status, finished: job.finished, proof: job.exit?.summary?.proof ?? null });
    show(place);
  }
}
