// The page of an import: timeline, tables and heat maps.
import { pairsPanel } from "../heat/pairs.js";
import { timePanel } from "../heat/time.js";
import { duration, integer } from "../format.js";
import { Bins } from "../rates.js";
import { stepOfTables } from "./step.js";
import { showCollectiveTimes, showGroups, showOverlap } from "./tables.js";
import { timelineView } from "./view.js";

const COLUMNS = 300; // of the rank heatmap
const page = document.getElementById("imported");
const $ = (id) => document.getElementById(id);
const select = $("timeline-step");
const view = timelineView($("step-timeline"));
const pairs = pairsPanel($("heat-pairs"));
const time = timePanel($("heat-time"));
// The fields of a job that the panels read. An import has no plan.
const job = { spec: { layout: {} }, estimate: null, members: [], finished: true, attempt: 1 };
const UNKNOWN = { bytes: "The bytes of collectives are not recorded in this step.", still: "The waiting times of this step are unknown." };
let shown = null;

/** Return bytes by rank, axis and time. Calls of unknown bytes are left out. */
export function makeBins(step) {
  const bins = new Bins(Math.max(1e-6, step.seconds / COLUMNS), COLUMNS + 2, "whole");
  for (const [rank, own] of step.ranks) {
    for (const call of own.calls.filter((one) => one.bytes !== null)) {
      bins.add(rank, `${step.groups[call.group].axis}/${call.op}`, step.began + call.from, call.bytes);
    }
  }
  return bins;
}

/** Return seconds of waiting for the last rank, by rank, axis and time. */
export function makeWaitBins(step) {
  const bins = new Bins(Math.max(1e-6, step.seconds / COLUMNS), COLUMNS + 2, "whole");
  for (const [rank, own] of step.ranks) {
    for (const call of own.calls) {
      const end = call.whole === null ? call.from : Math.min(call.whole, call.open ? call.whole : call.to);
      const axis = step.groups[call.group].axis;
      for (let at = call.from; at < end; at += bins.width) {
        bins.add(rank, `${axis}/`, step.began + at, Math.min(bins.width, end - at));
      }
    }
  }
  return bins;
}

function draw() {
  if (!shown) return;
  const { step, bins, waits } = shown;
  const empty = new Bins(1, 1, "recent");
  pairs(job, { ranks: new Map() }, step);
  time(job, { recent: empty, whole: bins, still: { recent: empty, whole: waits }, unknown: UNKNOWN });
}

async function load() {
  const number = Number(select.value);
  for (const link of page.querySelectorAll("[data-format]")) link.href = `${page.dataset.url}?step=${number}&format=${link.dataset.format}`;
  const answer = await fetch(`${page.dataset.url}?step=${number}`);
  if (!answer.ok) {
    delete page.dataset.reading;
    page.querySelector("[data-empty]").textContent = `Events not loaded: HTTP ${answer.status}.`;
    return;
  }
  const body = await answer.json();
  const step = stepOfTables(number, body.calls.columns, body.spans.columns);
  shown = { step, bins: makeBins(step), waits: makeWaitBins(step) };
  page.querySelector("#timeline-panel [data-empty]").hidden = true;
  view.show(step);
  page.querySelector(".timeline-tables").hidden = false;
  showCollectiveTimes($("timeline-collectives"), step);
  showGroups($("timeline-groups"), step, null, []);
  showOverlap($("timeline-overlap"), step, null);
  $("timeline-note").textContent = `${integer(step.ranks.size)} ${step.ranks.size === 1 ? "rank" : "ranks"} over ${duration(step.seconds)}.`;
  draw();
  delete page.dataset.reading;
}

select.addEventListener("change", load);
for (const id of ["heat-pairs", "heat-time"]) $(id).addEventListener("change", draw);
load();
