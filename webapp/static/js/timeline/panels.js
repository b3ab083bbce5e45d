// Traffic matrix, rank heatmap and step timeline, for the job page and the timeline page.
import { embedded } from "../dom.js";
import { pairsPanel } from "../heat/pairs.js";
import { timePanel } from "../heat/time.js";
import { timelinePanel } from "./panel.js";

const OFTEN_MS = 500; // least time between two drawings

/**
 * Return show(job, state, range), which draws the visible panels. `range` is {from, to} in unix seconds or nulls. `drawn` is
 * called when the history is loaded.
 */
export function tracePanels(drawn = () => {}) {
  const place = (id, make) => (document.getElementById(id) ? { panel: document.getElementById(id), show: make(document.getElementById(id)) } : null);
  const timeline = place("timeline-panel", (panel) => timelinePanel(panel, embedded("links"), () => soon(0)));
  const pairs = place("heat-pairs", pairsPanel);
  const time = place("heat-time", timePanel);
  const all = [timeline, pairs, time].filter((one) => one !== null);
  const inSight = new Set();
  /** @type {any} */
  let newest = null;
  let [last, waiting] = [-Infinity, false];
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inSight[isIntersecting ? "add" : "delete"](target);
    if (newest) soon(0);
  }, { rootMargin: "200px" });
  for (const { panel } of all) {
    observer.observe(panel);
    panel.addEventListener("change", () => newest && soon(0));
  }
  addEventListener("beforeprint", () => {
    for (const { panel } of all) inSight.add(panel);
    if (newest) draw();
  });

  function draw() {
    waiting = false;
    last = performance.now();
    const [job, state, range] = newest;
    const step = timeline && (inSight.has(timeline.panel) || pairs) ? timeline.show(job, state) : null;
    if (pairs && inSight.has(pairs.panel)) pairs.show(job, state, step);
    if (time && inSight.has(time.panel)) time.show(job, state, range);
    if (step !== undefined) drawn();
  }

  function soon(after) {
    if (waiting) return;
    waiting = true;
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, after));
  }

  return (job, state, range = {}) => {
    newest = [job, state, range];
    if (all.length > 0) soon(last + OFTEN_MS - performance.now());
  };
}
