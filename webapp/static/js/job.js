// The job page: ties the socket to the store, and the store to the widgets.
import { predictionOf } from "./collectives.js";
import { showCheckpoints } from "./checkpoints.js";
import { lossChart } from "./charts/loss.js";
import { MOST_LINES, trafficChart } from "./charts/traffic.js";
import { showDryRuns } from "./dryrun.js";
import { eachFrame, el, embedded } from "./dom.js";
import { duration, integer, loss, opName, tokenRate } from "./format.js";
import { showHeader } from "./jobheader.js";
import { logView } from "./joblog.js";
import { showHosts } from "./hostsofrun.js";
import { labView } from "./lab.js";
import { showBadge, showCollectives, showComparison, showVerdicts } from "./jobtables.js";
import { showPlanned } from "./planned.js";
import { showProof } from "./proof.js";
import { connect } from "./socket.js";
import { createState, expectGap, foldBatch, foldSummary, resumeFrom, secondsLeft } from "./store.js";
import { tracePanels } from "./timeline/panels.js";

const $ = (id) => document.getElementById(id);
let job = embedded("job");
let state = createState();
let paused = false;
const openAxes = new Set();
const drawLoss = whereItIs("loss-chart", lossChart);
const drawTraffic = whereItIs("traffic-chart", trafficChart);
const showLogs = whereItIs("logs", logView);
const showLab = whereItIs("lab-result", labView);
const showTraces = tracePanels();
const predictedOf = predictionOf(job.estimate);
const redraw = eachFrame(draw);

/** Each kind of job has its own panels (jobs/kinds.py): a widget is made where the page has its place. */
function whereItIs(id, make) {
  return $(id) ? make($(id)) : () => {};
}

function draw() {
  if (job.finished) {
    for (const place of document.querySelectorAll("[data-ended]")) {
      place.textContent = (state.fromSummary && place.dataset.gone) || place.dataset.ended;
    }
  }
  if ($("progress")) drawProgress();
  if ($("script-steps")) drawStepsSeen();
  drawLoss(state.losses, state.evalLosses);
  if ($("traffic-chart") && !paused) drawRates();
  const compared = $("fidelity") ? drawComparison() : [];
  showHosts($("hosts"), job, state, compared);
  if ($("checkpoints")) {
    const keep = job.spec.train.keep_checkpoints ?? 2;
    showCheckpoints($("checkpoints"), $("checkpoint-rows"), state.checkpoints, keep, job.id);
  }
  showLab(job.exit?.summary?.lab ?? null);
  if ($("dry-rows")) showDryRuns($("dry-rows"), state.dryRuns, state.verdicts);
  if ($("collectives")) showCollectives($("collectives"), state, $("phase").value ? [$("phase").value] : null);
  showLogs(state.logs, state.members);
  showTraces(job, state);
  if ($("verdict-panel")) drawVerdicts();
  $("gap").hidden = !state.lost;
  if (state.lost) {
    $("gap").textContent =
      "A part of the history is no longer kept. Graphs show a break there; totals are counted by the ranks and stay exact.";
  }
}

function drawVerdicts() {
  $("verdict-panel").hidden = state.verdicts.size === 0;
  if (state.verdicts.size > 0) showVerdicts($("verdicts"), $("verdict-summary"), state);
}

/** Of a script: how many optimiser steps ended, where that was told; else whether any did. */
function drawStepsSeen() {
  const steps = Math.max(state.progress?.step ?? 0, job.exit?.summary?.steps ?? 0);
  const some = [...state.ranks.values()].some((rank) => [...rank.cells.values()].some((cell) => cell.phase === "step"));
  if (steps > 0) $("script-steps").textContent = `${integer(steps)} optimiser ${steps === 1 ? "step" : "steps"} seen`;
  else if (some) $("script-steps").textContent = "optimiser steps seen";
  else $("script-steps").textContent = job.finished ? "no optimiser step seen" : "no optimiser step seen yet";
}

function drawComparison() {
  const { rows, off } = showComparison($("fidelity-rows"), $("fidelity-note"), state, predictedOf, openAxes, job.finished);
  const exact = $("fidelity-badge").dataset.exact === "true";
  showBadge($("fidelity-badge"), off, exact);
  if (off === null) delete $("fidelity").dataset.difference;
  else $("fidelity").dataset.difference = String(exact ? off.bytesOff : off.net);
  const measured = job.exit?.summary?.measured ?? null;
  const run = { device: job.spec.resources.device, measured, least: Number($("planned").dataset.least) };
  showPlanned($("planned-rows"), job.estimate, state, rows, run);
  const none = [...state.ranks.values()].some((rank) => rank.exactStep) ? { bytesOff: 0, callsOff: 0 } : null;
  const counted = off === null ? none : exact ? off : { bytesOff: off.net, callsOff: off.callsOff };
  if (job.engine === "elsewhere") return; // of a script of somebody's own nothing is proven, whatever it sends
  showProof($("proof"), state, counted, job.finished, exact, job.spec.train.precision);
  return rows;
}

function last(points) {
  const step = Math.max(...points.keys());
  return { step, loss: points.get(step) };
}

function drawProgress() {
  const { progress } = state;
  if (state.losses.size > 0) $("figure-loss").textContent = loss(last(state.losses).loss);
  if (state.evalLosses.size > 0) {
    const newest = last(state.evalLosses);
    $("figure-eval").textContent = loss(newest.loss);
    $("figure-eval-step").textContent = `after step ${integer(newest.step)}`;
  }
  const phases = new Set([...state.ranks.values()].map((rank) => rank.phase).filter(Boolean));
  const { finished } = job;
  $("figure-phase").textContent = phases.size > 0 && !finished ? `ranks are in: ${[...phases].join(", ")}` : "";
  if (!progress) return;
  const steps = progress.steps ?? job.spec.train.steps;
  $("figure-step").textContent = `${integer(progress.step)} of ${integer(steps)}`;
  $("progress").value = progress.step;
  $("progress").max = steps;
  $("figure-rate").textContent = tokenRate(progress.rate);
  $("figure-step-time").textContent = progress.step_s ? `${duration(progress.step_s)} last step` : "";
  $("figure-left").textContent = finished ? "–" : duration(secondsLeft(progress));
}

function fillSelect(select, values, name) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value)) select.append(el("option", { value }, name(value)));
}

function drawRates() {
  const bins = document.querySelector("[name=range]:checked").value === "whole" ? state.whole : state.recent;
  const keys = new Set([...bins.rows.values()].flatMap((row) => [...row.keys()]));
  fillSelect($("by-axis"), [...new Set([...keys].map((key) => key.split("/")[0]))].sort(), (axis) => `axis ${axis}`);
  fillSelect($("by-op"), [...new Set([...keys].map((key) => key.split("/")[1]))].sort(), opName);
  const [axis, op] = [$("by-axis").value, $("by-op").value];
  const accepts = (key) => {
    const [keyAxis, keyOp] = key.split("/");
    return (!axis || axis === keyAxis) && (!op || op === keyOp);
  };
  const ranks = [...bins.rows.keys()].sort((a, b) => a - b);
  drawTraffic(bins, ranks.slice(0, MOST_LINES), accepts, !job.finished);
  const dropped = [...state.ranks.values()].reduce((sum, rank) => sum + rank.dropped, 0);
  const notes = [];
  if (state.recent.length > 0) notes.push(`Payload bytes issued per second, averaged over ${duration(bins.width)}.`);
  if (ranks.length > MOST_LINES) notes.push(`Ranks 0–${MOST_LINES - 1} of ${ranks.length}; all count in the tables.`);
  if (dropped > 0) notes.push(`${integer(dropped)} timing records dropped; byte counters are exact.`);
  if (state.fromSummary) notes.push("The live stream of this run is gone; totals come from its stored summary.");
  $("traffic-note").textContent = notes.join(" ");
}

function onJob(next) {
  if (next.attempt !== job.attempt) state = createState();
  job = next;
  showHeader(job);
  seedFromSummary();
  redraw();
}

function seedFromSummary() {
  if (job.exit?.summary && state.time === null) foldSummary(state, job.exit.summary);
}

function onBatch(id, batch, node) {
  foldBatch(state, id, batch, node);
  redraw();
}

const CONNECTION = {
  connecting: ["", "connecting"],
  live: ["good", "live"],
  delayed: ["warn", "delayed: Redis cannot be reached; training goes on"],
  reconnecting: ["warn", "reconnecting"],
  refused: ["bad", "not allowed: reload the page"],
};

function onConnection(name) {
  const badge = $("connection");
  const [tone, words] = CONNECTION[name];
  badge.hidden = job.finished && name === "live";
  badge.dataset.tone = tone;
  if (badge.textContent !== words) badge.textContent = words;
}

function listen() {
  for (const id of ["by-axis", "by-op", "phase"]) $(id)?.addEventListener("change", redraw);
  for (const radio of document.querySelectorAll("[name=range]")) radio.addEventListener("change", redraw);
  $("pause")?.addEventListener("click", (event) => {
    paused = !paused;
    event.currentTarget.textContent = paused ? "Go live" : "Pause";
    event.currentTarget.setAttribute("aria-pressed", String(paused));
    redraw();
  });
  $("fidelity")?.addEventListener("click", (event) => {
    const axis = event.target.closest("button")?.dataset.axis;
    if (!axis) return;
    if (!openAxes.delete(axis)) openAxes.add(axis);
    drawComparison();
    $("fidelity").querySelector(`button[data-axis="${axis}"]`)?.focus();
  });
  const dialog = $("cancel-dialog");
  $("cancel-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.showModal();
  });
  $("keep").addEventListener("click", () => dialog.close());
  dialog.querySelector("button.primary").addEventListener("click", () => $("cancel-form").submit());
}

listen();
const whole = document.querySelector("[name=range][value=whole]");
if (job.finished && whole) whole.checked = true;
showHeader(job);
seedFromSummary();
redraw();
connect(`/ws/jobs/${job.id}/`, {
  resume: () => ({ after: resumeFrom(state), attempt: job.attempt }),
  onJob,
  onGap: (node) => expectGap(state, node),
  onBatch,
  onState: onConnection,
});
