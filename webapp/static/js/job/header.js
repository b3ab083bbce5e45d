// The head of the job page: status, state times, notice, and actions.
import { el, write } from "../dom.js";
import { exactTime, timeAfter } from "../format.js";
import { BAD, endingWords } from "./ending.js";
import { wasPlaced } from "./nothing.js";

const $ = (id) => document.getElementById(id);
const DIVERGED = /^Diverged\b/; // another layout does not change the training
const AGAIN = new Set(["failed", "lost", "cancelled"]);

function time(at, before) {
  const date = new Date(at);
  return el("time", { dateTime: date.toISOString() }, before ? timeAfter(new Date(before), date) : exactTime(date));
}

/** The changes of the current attempt. The server writes those of earlier attempts. */
function showTimeline({ history, attempt, backfilled }) {
  const own = history.filter((change) => change.attempt === attempt);
  const lines = own.map((change, place) => {
    const number = place === 0 && attempt > 1 ? ` (attempt ${attempt})` : "";
    const mark = backfilled && change.status === "starting" ? " (backfilled)" : "";
    return el("li", { title: change.reason || null }, el("b", {}, change.status), `${mark}${number} `, time(change.at, own[place - 1]?.at));
  });
  $("states").replaceChildren(...lines);
}

const capital = (word) => word[0].toUpperCase() + word.slice(1);

/** [tone, words] of states that the verdict does not show. */
function makeNotice(job, hasVerdict) {
  if (job.status === "cancelling" && job.wait_reason) return ["info", `Canceling: ${job.wait_reason}`];
  if (job.status === "unreachable") return ["warn", `${capital(job.history.at(-1).reason)}. Training may continue. The page updates when the host reconnects.`];
  if (job.status === "cancelled") return ["warn", endingWords(job)];
  if (BAD.has(job.status) && !(hasVerdict && wasPlaced(job))) return ["bad", endingWords(job)];
  return ["", ""];
}

function showNotice(job) {
  const box = $("notice");
  const [tone, words] = makeNotice(job, $("health") !== null);
  box.hidden = words === "";
  box.dataset.tone = tone;
  write(box, words);
}

/** Show the Slurm job, for example "Slurm job 17 · partition gpu · node[0-1] · running". */
function showEngine(job) {
  const { state, partition, nodes } = job.engine_told;
  const parts = [
    job.engine_id ? `Slurm job ${job.engine_id}` : "Not yet in the Slurm queue",
    partition && `partition ${partition}`,
    nodes,
    state && !job.finished && state.toLowerCase(),
  ];
  write($("engine"), parts.filter(Boolean).join(" · "));
}

/** Readers without the right to change the job never see the form. */
function show(id, fits) {
  $(id).hidden = !fits || $(id).dataset.mayNot !== undefined;
}

/** Whether the page offers another attempt. */
export const mayRetry = () => !$("requeue-form").hidden;

export function showHeader(job) {
  const badge = $("status");
  if (badge.textContent !== job.status) badge.textContent = job.status;
  badge.dataset.status = job.status;
  show("cancel-form", !job.finished && job.status !== "cancelling");
  const disproved = job.exit?.summary?.proof?.wrong.length > 0; // another attempt would resume from a wrong checkpoint
  show("requeue-form", AGAIN.has(job.status) && !disproved);
  for (const id of ["end-mail", "no-end-mail"]) if ($(id)) $(id).hidden = job.finished;
  const diverged = DIVERGED.test(job.diagnosis?.sentence ?? "");
  if ($("smaller")) $("smaller").hidden = disproved || diverged || (!BAD.has(job.status) && !(job.status === "queued" && $("smaller").dataset.stranded !== undefined));
  if (job.engine === "elsewhere") {
    write($("where"), job.host);
    const silent = job.status === "unreachable" || (job.status === "cancelling" && job.wait_reason);
    show("give-up-form", silent);
  }
  if (job.engine === "slurm") showEngine(job);
  showTimeline(job);
  showNotice(job);
}
