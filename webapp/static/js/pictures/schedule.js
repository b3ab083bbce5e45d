// The planned pipeline schedule: one row per stage, one box per action.
import { el, legendEntry } from "../dom.js";
import { counted, duration } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 18;
const GAP = 3;
const WIDTH = 1000; // of the viewBox
const READABLE = 16;
const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function drawSchedule(timeline) {
  const { cells, stages, step_s: step } = timeline;
  const height = stages * (ROW + GAP);
  const label = `Pipeline schedule of ${counted(stages, "stage")} and ${counted(timeline.micro_batches, "micro-batch", "micro-batches")}, ${(100 * timeline.bubble).toFixed(1)}% idle`;
  const picture = svg("svg", { class: "schedule", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (let stage = 0; stage < stages; stage += 1) {
    picture.append(svg("rect", { class: "idle", x: 0, y: stage * (ROW + GAP), width: WIDTH, height: ROW }));
  }
  for (const [stage, kind, microBatch, chunk, start, end] of cells) {
    const x = (WIDTH * start) / step;
    const width = (WIDTH * (end - start)) / step;
    const box = svg("rect", { class: `kind-${kind.toLowerCase()}`, x, y: stage * (ROW + GAP), width: Math.max(width - 0.6, 0.4), height: ROW });
    box.dataset.odd = String(Math.floor(chunk / stages) % 2);
    box.append(svg("title", {}, `stage ${stage}: ${NAMES[kind]} of micro-batch ${microBatch}, chunk ${chunk}, ${duration(start)} to ${duration(end)}`));
    picture.append(box);
  }
  const labels = el("div", { className: "schedule-labels" }, ...Array.from({ length: stages }, (_, stage) => el("span", {}, String(stage))));
  const kinds = [...new Set(cells.map((c) => c[1]))];
  const legend = el(
    "p",
    { className: "note legend" },
    ...kinds.flatMap((kind) => [legendEntry(`--kind-${kind.toLowerCase()}`, NAMES[kind]), " "]),
    legendEntry("--part-bubble", "idle"),
  );
  const part = timeline.whole ? "" : `The picture shows the first ${counted(stages, "stage")} and ${counted(timeline.micro_batches, "micro-batch", "micro-batches")}. `;
  const words = `${part}Idle time: ${(100 * timeline.bubble).toFixed(1)}%, mean over ${part ? "these" : "all"} stages. The part “bubble” of the step time is the idle time of the busiest stage.`;
  const rows = timeline.in_flight.slice(0, READABLE).map((most, stage) => el("tr", {}, rowHead(null, String(stage)), cell(String(most))));
  const table = el("details", {}, el("summary", {}, "Stored activations by stage"), scrolling([th("stage"), th("maximum number of chunks in flight", true)], rows));
  return [el("div", { className: "schedule-frame" }, labels, picture), legend, el("p", { className: "note" }, words), table];
}
