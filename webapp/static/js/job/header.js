// State, timeline, wait reason and failure of the job page's head, from the job as REST tells it.
import { el, write } from "../dom.js";
import { exactTime, timeAfter } from "../format.js";
import { plain } from "../logs/ansi.js";
import { upright } from "../upright.js";

const $ = (id) => document.getElementById(id);
const AGAIN = new Set(["failed", "lost", "cancelled"]);
const BAD = new Set(["failed", "lost"]);
const LONG = 160; // characters of a reason; the verdict below begins with the same words

function time(at, before) {
  const date = new Date(at);
  return el("time", { dateTime: date.toISOString() }, before ? timeAfter(new Date(before), date) : exactTime(date));
}

$("states").addEventListener("scroll", ({ target }) => target.toggleAttribute("data-scrolled", target.scrollLeft > 0));

function showTimeline(history) {
  const lines = history.map((change, place) => {
    const attempt = change.attempt > 1 ? ` (attempt ${change.attempt})` : "";
    return el("li", { title: change.reason || null }, el("b", {}, change.status), `${attempt} `, time(change.at, history[place - 1]?.at));
  });
  $("states").replaceChildren(...lines);
  $("states").scrollLeft = $("states").scrollWidth; // of many attempts the last is in sight
}

const capital = (word) => word[0].toUpperCase() + word.slice(1);
const lastReason = (job) => job.history.at(-1)?.reason || "the run ended without a report";

function ending(job) {
  const { exit } = job;
  const facts = [];
  if (!BAD.has(job.status)) return [el("p", {}, el("strong", {}, `${capital(job.status)}: `), exit?.reason || lastReason(job))];
  if (exit?.rank !== null && exit?.rank !== undefined) facts.push(`rank ${exit.rank}`);
  if (exit?.signal) facts.push(exit.signal);
  else if (exit?.exit_code) facts.push(`exit code ${exit.exit_code}`);
  const reason = exit?.reason || lastReason(job);
  const head = el("p", { title: reason.length > LONG ? reason : "" }, el("strong", {}, `${capital(job.status)}: `));
  head.append(upright(reason.length > LONG ? `${reason.slice(0, LONG - 1)}… (whole in the log)` : reason));
  if (facts.length > 0) head.append(` (${facts.join(", ")})`);
  const tail = exit?.log_tail ?? [];
  if (tail.length === 0) return [head];
  const last = tail.map(plain).findLast((line) => line.trim() !== "") ?? "";
  return [head, el("details", {}, el("summary", {}, "Last lines: ", el("code", {}, last.trim())), el("pre", { tabIndex: 0 }, tail.map(plain).join("\n")))];
}

function showNotice(job) {
  const box = $("notice");
  const waits = ["queued", "cancelling"].includes(job.status) && job.wait_reason;
  const ended = BAD.has(job.status) || job.status === "cancelled";
  box.hidden = !waits && !ended && job.status !== "unreachable";
  if (box.hidden) return;
  box.dataset.tone = BAD.has(job.status) ? "bad" : waits ? "info" : "warn";
  if (waits) write(box, `Waiting: ${job.wait_reason}`);
  else if (ended) box.replaceChildren(...ending(job));
  else write(box, `${capital(job.history.at(-1).reason)}. Training may well go on; the page catches up when it speaks.`);
}

/** "Slurm job 17 · partition gpu · node[0-1] · running", as far as Slurm has told. */
function showEngine(job) {
  const { state, partition, nodes } = job.engine_told;
  const parts = [
    job.engine_id ? `Slurm job ${job.engine_id}` : "Not yet in Slurm's queue",
    partition && `partition ${partition}`,
    nodes,
    state && !job.finished && state.toLowerCase(),
  ];
  write($("engine"), parts.filter(Boolean).join(" · "));
}

/** Who may only look at a job gets neither. */
function show(id, fits) {
  $(id).hidden = !fits || $(id).dataset.mayNot !== undefined;
}

export function showHeader(job) {
  const badge = $("status");
  if (badge.textContent !== job.status) badge.textContent = job.status;
  badge.dataset.status = job.status;
  show("cancel-form", !job.finished && job.status !== "cancelling");
  const disproved = job.exit?.summary?.proof?.wrong.length > 0; // a try would go on from what its run saved
  show("requeue-form", AGAIN.has(job.status) && !disproved);
  for (const id of ["end-mail", "no-end-mail"]) if ($(id)) $(id).hidden = job.finished;
  if ($("smaller")) $("smaller").hidden = disproved || (!BAD.has(job.status) && !(job.status === "queued" && $("smaller").dataset.stranded !== undefined));
  if (job.engine === "elsewhere") {
    write($("where"), job.host);
    const silent = job.status === "unreachable" || (job.status === "cancelling" && job.wait_reason);
    show("give-up-form", silent);
  }
  if (job.engine === "slurm") showEngine(job);
  showTimeline(job.history);
  showNotice(job);
}
