// The job page: ties history and socket to the store, and the store to the widgets.
import { extentOf } from "../charts/extent.js";
import { createView } from "../charts/view.js";
import { compareAxes, predictionOf } from "../collectives.js";
import { eachFrame, embedded, notMoreOftenThan } from "../dom.js";
import { follow, seedFromSummary } from "../fold/follow.js";
import { replay } from "../fold/replay.js";
import { integer } from "../format.js";
import { labView } from "../lab/panel.js";
import { logView } from "../logs/panel.js";
import { createState } from "../store.js";
import { tracePanels } from "../timeline/panels.js";
import { showCheckpoints } from "./checkpoints.js";
import { showConnection } from "./connection.js";
import { curvesView } from "./curves.js";
import { showDryMemory, showDryRuns } from "./dryrun.js";
import { showOff, showProgress, showStepsSeen } from "./figures.js";
import { showHeader } from "./header.js";
import { healthView } from "./health.js";
import { showHosts } from "./hosts.js";
import { jumpBar, rangeBar } from "./jump.js";
import { nothingView } from "./nothing.js";
import { stepsOf } from "./parts.js";
import { placesView } from "./places.js";
import { showPlanned } from "./planned.js";
import { showProof } from "./proof.js";
import { slowStretch } from "./slowsteps.js";
import { startBar } from "./start.js";
import { stepBar } from "./stepbar.js";
import { showBadge, showCollectives, showComparison, showVerdicts } from "./tables.js";
import { trafficView } from "./traffic.js";

const $ = (id) => document.getElementById(id);
const CHARTS_MS = 250; // charts of half-second bins need no more
let job = embedded("job");
let state = createState();
let paused = false;
let replayed = false; // what the server kept has been asked for
let kept = null; // whether it kept anything
let verdictsTold = "";
const openAxes = new Set();
const view = createView(() => location.search, (search) => history.replaceState(null, "", location.pathname + search + location.hash));
const page = { view, curve: { time: [], step: [] }, marks: [] }; // what all charts share
if ($("slow-steps")) slowStretch($("slow-steps"), page, () => job);
const redraw = eachFrame(draw);
const redrawCharts = notMoreOftenThan(CHARTS_MS, drawCharts);
const showNothing = nothingView($("main"), $("nothing"));
const showHealth = whereItIs("health", (place) => healthView(place, showSteps));
const showPlaces = whereItIs("places", placesView);
const showParts = whereItIs("parts", stepBar);
const showStart = whereItIs("start", startBar);
const drawTraffic = whereItIs("traffic", (place) => trafficView(place, page, drawCharts));
const drawCurves = curvesView(page, drawCharts);
const showLogs = whereItIs("logs", logView);
const showLab = whereItIs("lab-result", labView);
const showJumps = whereItIs("jump", (bar) => jumpBar(bar, $("board")));
const showRange = whereItIs("ranges", (bar) => rangeBar(bar, page));
const showTraces = tracePanels();
const predictedOf = predictionOf(job.estimate);

/** Each kind of job has its own panels (jobs/kinds.py): a widget is made where the page has its place. */
function whereItIs(id, make) {
  return $(id) ? make($(id)) : () => {};
}

function draw() {
  if (job.finished && replayed) {
    for (const place of document.querySelectorAll("[data-ended]")) {
      place.textContent = (state.fromSummary && place.dataset.gone) || place.dataset.ended;
    }
  }
  if ($("progress")) showProgress(job, state);
  if ($("script-steps")) showStepsSeen($("script-steps"), job, state);
  showNothing(job, state, kept);
  showHealth(job);
  showPlaces(job, state);
  showParts(job, state);
  showStart(job, state);
  if ($("fidelity")) drawComparison();
  showHosts($("hosts"), job, state, (levelOf) => ($("fidelity") ? compareAxes(state.ranks, predictedOf, levelOf) : []));
  if ($("checkpoints")) {
    const keep = job.spec.train.keep_checkpoints ?? 2;
    showCheckpoints($("checkpoints"), $("checkpoint-rows"), state.checkpoints, keep, job.id);
  }
  showLab(job.exit?.summary?.lab ?? null);
  if ($("dry-rows")) {
    showDryRuns($("dry-rows"), job, state.dryRuns, state.verdicts);
    showDryMemory($("dry-memory"), $("dry-memory-rows"), job, state.dryRuns);
  }
  if ($("collectives")) showCollectives($("collectives"), state, $("phase").value ? [$("phase").value] : null, job.finished);
  showLogs(state, job);
  showTraces(job, state, shownRange());
  if ($("verdict-panel")) drawVerdicts();
  $("gap").hidden = !state.lost;
  if (state.lost) {
    $("gap").textContent =
      "A part of the history is no longer kept. Graphs show a break there; totals are counted by the ranks and stay exact.";
  }
  showJumps();
  if ($("pause")) $("pause").hidden = job.finished;
  if (!paused) redrawCharts();
}

function drawCharts() {
  page.marks = [...state.marks.values()];
  const extent = extentOf(state);
  if (extent) view.extend(...extent);
  drawCurves(job, state);
  drawTraffic(job, state);
  showRange();
  $("main").toggleAttribute("data-over", job.finished && replayed); // a chart without a line will have none
}

/** A stretch of steps in all charts, from the end of the step before the first. */
function showSteps(first, last) {
  const { step, time } = page.curve;
  const [from, to] = [step.findIndex((one) => one >= first - 1), step.findLastIndex((one) => one <= last)];
  if (from >= 0 && to > from) view.zoom(time[from], time[to]);
  $("training")?.scrollIntoView();
}

/** The stretch that the charts show; nulls for the whole run. */
function shownRange() {
  const { from, to, last } = view.now;
  if (from !== null) return { from, to };
  return last === null || state.time === null ? { from: null, to: null } : { from: state.time - last, to: null };
}

/** How many ranks have a verdict to tell: of a dry run those that it tries. */
const telling = () => job.spec.dry_ranks?.length || job.world_size;

function drawVerdicts() {
  $("verdict-panel").hidden = state.verdicts.size === 0;
  const told = `${job.attempt} ${state.verdicts.size}`; // each rank tells its own once
  if (told === verdictsTold) return;
  verdictsTold = told;
  if (state.verdicts.size > 0) showVerdicts($("verdicts"), $("verdict-summary"), state, telling());
}

function drawComparison() {
  const { rows, off: compared } = showComparison($("fidelity-rows"), $("fidelity-note"), state, predictedOf, openAxes, job.finished);
  const counted = job.engine === "elsewhere" ? 0 : [...state.ranks.values()].filter((rank) => rank.exactStep).length;
  const off = compared ?? (counted > 0 ? { bytesOff: 0, callsOff: 0, net: 0 } : null); // one rank sends nothing, and did not
  const exact = $("fidelity-badge").dataset.exact === "true";
  const missing = counted < job.world_size ? ` on ${integer(counted)} of ${integer(job.world_size)} ranks` : "";
  showBadge($("fidelity-badge"), off, exact, missing);
  if (off === null) delete $("fidelity").dataset.difference;
  else $("fidelity").dataset.difference = String(exact ? off.bytesOff : off.net);
  showOff(off, exact);
  const measured = job.exit?.summary?.measured ?? null;
  const run = { device: job.spec.resources.device, measured, apart: stepsOf(job, state), least: Number($("planned").dataset.least) };
  showPlanned($("planned-rows"), job.estimate, state, rows, run);
  const proven = off === null || exact ? off : { bytesOff: off.net, callsOff: off.callsOff };
  if (job.engine === "elsewhere") return; // of a script of somebody's own nothing is proven, whatever it sends
  showProof($("proof"), state, proven, job.finished, exact, job.spec.train.precision, telling());
}

function onJob(next) {
  job = next;
  showHeader(job);
}

/** Of another attempt nothing here is true, what the server wrote neither; a reload keeps the address and the place on the page. */
function openAnew() {
  view.follow(view.now.last); // the range and the cursor were times of this one
  view.pin(null);
  location.reload();
}

function onConnection(name) {
  showConnection($("connection"), name, job.finished);
}

function listen() {
  $("phase")?.addEventListener("change", redraw);
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
showHeader(job);
onConnection("reading");
redraw(); // where everything lies: what is not read yet is hidden, for no word for it would be true
kept = await replay(state, job);
replayed = true;
for (const place of document.querySelectorAll("[data-reading]")) delete place.dataset.reading;
seedFromSummary(state, job);
redraw();
follow(() => ({ job, state }), {
  onJob,
  onAttempt: openAnew,
  onRead(fresh, found) {
    [state, kept] = [fresh, found];
  },
  redraw,
  onState: onConnection,
});
