// The job page: history and socket fill the store, and the widgets show the store.
import { getExtent } from "../charts/extent.js";
import { createView } from "../charts/view.js";
import { compareAxes, makePrediction } from "../collectives.js";
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
import { mayRetry, showHeader } from "./header.js";
import { healthView } from "./health.js";
import { showHosts } from "./hosts.js";
import { metricsView } from "./metrics.js";
import { nothingView } from "./nothing.js";
import { getSteps } from "./parts.js";
import { placesView } from "./places.js";
import { showPlanned } from "./planned.js";
import { showProof } from "./proof.js";
import { rangeBar } from "./ranges.js";
import { slowStretch } from "./slowsteps.js";
import { boardClock, startBar, startPhase } from "./start.js";
import { stepBar } from "./stepbar.js";
import { showBadge, showCollectives, showComparison, showVerdicts } from "./tables.js";
import { isOpen, jobTabs } from "./tabs.js";
import { trafficView } from "./traffic.js";
import { waitingView } from "./waiting.js";

const $ = (id) => document.getElementById(id);
const CHARTS_MS = 250; // bins of charts are half a second
const SECOND_MS = 1000;
let job = embedded("job");
let state = createState();
let paused = false;
let replayed = false; // the history of the server was requested
let hasHistory = null; // whether the server has a history
let shownVerdicts = "";
let logRank = null; // rank whose log opens next
const openAxes = new Set();
const view = createView(() => location.search, (search) => history.replaceState(null, "", location.pathname + search + location.hash));
/** @type {{view: any, curve: any, marks: any[]}} */
const page = { view, curve: { time: [], step: [] }, marks: [] }; // shared by all charts
if ($("slow-steps")) slowStretch($("slow-steps"), page, () => job);
const redraw = eachFrame(draw);
const redrawCharts = notMoreOftenThan(CHARTS_MS, drawCharts);
const showNothing = nothingView($("main"), $("nothing"));
const boardNow = boardClock($("states"));
const showTabs = whereItIs("tabs", (bar) => jobTabs(bar, redraw));
const showHealth = whereItIs("health", (place) => healthView(place, { showSteps, mayRetry, openLog }));
const showWaiting = whereItIs("waiting", (place) => waitingView(place, () => job));
const showPlaces = whereItIs("places", placesView);
const showParts = whereItIs("parts", stepBar);
const showStart = whereItIs("start", startBar);
const drawTraffic = whereItIs("traffic", (place) => trafficView(place, page, drawCharts));
const drawMetrics = whereItIs("metrics", (panel) => metricsView(panel, page, drawCharts));
const drawCurves = curvesView(page, drawCharts);
const showLogs = whereItIs("logs", logView);
const showLab = whereItIs("lab-result", labView);
const showRange = whereItIs("ranges", (bar) => rangeBar(bar, page));
const showTraces = tracePanels();
const predict = makePrediction(job.estimate);

/** The page of a kind of job has some of the panels (jobs/core/kinds.py). A widget draws while its tab is open. */
function whereItIs(id, make) {
  if (!$(id)) return () => {};
  const show = make($(id));
  return (...all) => (isOpen($(id)) ? show(...all) : undefined);
}

function draw() {
  if (job.finished && replayed) {
    for (const place of document.querySelectorAll("[data-ended]")) {
      place.textContent = (state.fromSummary && place.dataset.gone) || place.dataset.ended;
    }
  }
  if ($("figures")) showProgress(job, state);
  if ($("script-steps")) showStepsSeen($("script-steps"), job, state);
  showNothing(job, state, hasHistory);
  const phase = startPhase(job, state, boardNow());
  showHealth(job, phase);
  showWaiting(job);
  showPlaces(job, state);
  showParts(job, state);
  showStart(job, state, phase);
  if ($("fidelity")) drawComparison();
  showHosts($("hosts"), job, state, (getLevel) => ($("fidelity") && isOpen($("hosts")) ? compareAxes(state.ranks, predict, getLevel) : []));
  if ($("checkpoints")) {
    const keep = job.spec.train.keep_checkpoints ?? 2;
    showCheckpoints($("checkpoints"), $("checkpoint-rows"), state.checkpoints, keep, job.id);
  }
  showLab(job.exit?.summary?.lab ?? null);
  if ($("dry-rows")) {
    showDryRuns($("dry-rows"), job, state.dryRuns, state.verdicts);
    showDryMemory($("dry-memory"), $("dry-memory-rows"), job, state.dryRuns);
  }
  if (isOpen($("collectives"))) showCollectives($("collectives"), state, $("phase").value ? [$("phase").value] : null, job.finished);
  showLogs(state, job);
  showLogOfRank();
  const hasTraces = ["timeline-panel", "heat-pairs", "heat-time"].some((id) => isOpen($(id)));
  if (replayed && hasTraces) showTraces(job, state, shownRange());
  if ($("verdict-panel")) drawVerdicts();
  $("gap").hidden = !state.lost;
  if (state.lost) {
    $("gap").textContent = "Part of the history is no longer stored. Charts have a gap. Totals are exact, because ranks count them.";
  }
  showTabs();
  if ($("pause")) $("pause").hidden = job.finished;
  if (!paused) redrawCharts();
}

function drawCharts() {
  page.marks = [...state.marks.values()];
  const extent = getExtent(state);
  if (extent) view.extend(...extent);
  drawCurves(job, state);
  drawMetrics(state);
  drawTraffic(job, state);
  showRange();
  $("main").toggleAttribute("data-over", job.finished && replayed); // empty charts stay empty
}

/** Show a range of steps in all charts, from the end of the step before the range. */
function showSteps(first, last) {
  const { step, time } = page.curve;
  const [from, to] = [step.findIndex((one) => one >= first - 1), step.findLastIndex((one) => one <= last)];
  if (from >= 0 && to > from) view.zoom(time[from], time[to]);
  $("loss")?.scrollIntoView({ block: "nearest" });
}

/** Open the log of a rank, or the log as it is if `rank` is negative. */
function openLog(rank) {
  logRank = rank >= 0 ? rank : null;
  history.replaceState(null, "", location.pathname + location.search); // so that the same hash opens the tab again
  location.hash = "logs";
  redraw();
}

function showLogOfRank() {
  const choice = document.querySelector("[name=log-rank]");
  if (logRank === null || !replayed || !isOpen(choice)) return;
  const option = [...choice.options].find(({ value }) => value === String(logRank));
  logRank = null;
  if (!option) return; // the rank wrote nothing
  choice.value = option.value;
  choice.dispatchEvent(new Event("change"));
}

/** {from, to} of the charts, nulls for the whole run. */
function shownRange() {
  const { from, to, last } = view.now;
  if (from !== null) return { from, to };
  return last === null || state.time === null ? { from: null, to: null } : { from: state.time - last, to: null };
}

/** The number of ranks with a verdict. A dry run has one per dry rank. */
const countVerdictRanks = () => job.spec.dry_ranks?.length || job.world_size;

function drawVerdicts() {
  $("verdict-panel").hidden = state.verdicts.size === 0;
  const key = `${job.attempt} ${state.verdicts.size}`; // each rank sends its verdict once
  if (key === shownVerdicts || !isOpen($("verdict-panel"))) return;
  shownVerdicts = key;
  if (state.verdicts.size > 0) showVerdicts($("verdicts"), $("verdict-summary"), state, countVerdictRanks());
}

function drawComparison() {
  const { rows, off: compared } = showComparison($("fidelity-rows"), $("fidelity-note"), state, predict, openAxes, job.finished);
  const counted = job.engine === "elsewhere" ? 0 : [...state.ranks.values()].filter((rank) => rank.exactStep).length;
  const off = compared ?? (counted > 0 ? { bytesOff: 0, callsOff: 0, net: 0 } : null); // a single rank has no traffic
  const exact = $("fidelity-badge").dataset.exact === "true";
  const missing = counted < job.world_size ? ` on ${integer(counted)} of ${integer(job.world_size)} ranks` : "";
  showBadge($("fidelity-badge"), off, exact, missing);
  if (off === null) delete $("fidelity").dataset.difference;
  else $("fidelity").dataset.difference = String(exact ? off.bytesOff : off.net);
  showOff(off, exact);
  if (isOpen($("planned"))) showPlan(rows, exact);
  const proven = off === null || exact ? off : { bytesOff: off.net, callsOff: off.callsOff };
  if (job.engine === "elsewhere" || !isOpen($("proof"))) return; // Meshboard does not verify external runs
  showProof($("proof"), state, proven, job.finished, exact, countVerdictRanks());
}

function showPlan(rows, isExact) {
  const measured = job.exit?.summary?.measured ?? null;
  const run = { device: job.spec.resources.device, measured, apart: getSteps(job, state), least: Number($("planned").dataset.least), isExact };
  showPlanned($("planned-rows"), job.estimate, state, rows, run);
}

function onJob(next) {
  job = next;
  showHeader(job);
}

/** Reload for another attempt: nothing on the page is true of it. The address and the scroll position stay. */
function openAnew() {
  view.follow(view.now.last); // the range and the cursor are times of the old attempt
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
    event.currentTarget.textContent = paused ? "Resume charts" : "Freeze charts";
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
  dialog.querySelector("button.danger").addEventListener("click", () => $("cancel-form").submit());
}

listen();
showHeader(job);
onConnection("reading");
redraw(); // data-reading hides panels without data
hasHistory = await replay(state, job);
replayed = true;
for (const place of document.querySelectorAll("[data-reading]")) delete place.dataset.reading;
setInterval(() => startPhase(job, state, boardNow()) && redraw(), SECOND_MS);
seedFromSummary(state, job);
redraw();
follow(() => ({ job, state }), {
  onJob,
  onAttempt: openAnew,
  onRead(fresh, found) {
    [state, hasHistory] = [fresh, found];
  },
  redraw,
  onState: onConnection,
});
