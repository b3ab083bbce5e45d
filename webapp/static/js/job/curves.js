// The charts of training and of hosts, with the smoothing and memory choices.
import { GAUGE_CHARTS, gaugeChart, gaugeLines, memoryFields, memoryLines } from "../charts/gauges.js";
import { CURVES, curveChart, curveColumns, mfuFrom } from "../charts/training.js";
import { MOST_LINES } from "../charts/traffic.js";
import { el } from "../dom.js";
import { integer } from "../format.js";

const KEY = "meshboard-smoothing";
const FIELD_NAMES = { allocated_bytes: "allocated", reserved_bytes: "reserved", resident_bytes: "resident" };
const $ = (id) => document.getElementById(id);
const present = (ids) => ids.filter((id) => $(id));

/** Return draw(job, state), which also sets `page.curve` for the axes of all charts. */
export function curvesView(page, redraw) {
  const curves = present(Object.keys(CURVES)).map((id) => [id, curveChart($(id), page)]);
  const gauges = present(Object.keys(GAUGE_CHARTS)).map((id) => [id, gaugeChart($(id), page)]);
  const slider = $("smoothing");
  if (slider) remember(slider, redraw);
  $("memory-field")?.addEventListener("change", redraw);

  return (job, state) => {
    page.curve = curveColumns(state.steps, mfuFrom(job.estimate) ?? undefined);
    const weight = slider ? Number(slider.value) : 0;
    for (const [id, draw] of curves) if (hasValues(page.curve, CURVES[id].name, state.evals)) draw(page.curve, state.evals, weight);
    const hosts = new Map([...state.members].map(([node, { host }]) => [node, host]));
    for (const [id, draw] of gauges) {
      const drawing = id === "memory-chart" ? memory(job, state, page) : gaugeLines(GAUGE_CHARTS[id], state.gauges, hosts);
      draw(drawing);
      showLeftOut($(id), drawing.left, id === "memory-chart" ? "the highest" : "the first");
    }
  };
}

/** Whether a curve has a value. A script does not report every value. */
function hasValues(curve, name, evals) {
  return curve[name].some((value) => value !== null && value !== undefined) || (name === "train" && evals.size > 0);
}

/** Show next to the caption how many lines a chart leaves out. */
function showLeftOut(chart, left, which) {
  const words = left > 0 ? ` · ${which} ${integer(MOST_LINES)} of ${integer(MOST_LINES + left)} lines` : "";
  const place = chart.parentElement.querySelector("[data-left]");
  if (place.textContent !== words) place.textContent = words;
}

/** Keep the choice in the storage of the browser, if the browser allows it. */
function remember(slider, redraw) {
  const output = $("smoothing-value");
  const show = () => (output.textContent = Number(slider.value) === 0 ? "off" : Number(slider.value).toFixed(2));
  try {
    slider.value = localStorage.getItem(KEY) ?? slider.value;
  } catch {}
  slider.addEventListener("input", () => {
    show();
    redraw();
    try {
      localStorage.setItem(KEY, slider.value);
    } catch {}
  });
  show();
}

function memory(job, state, page) {
  const select = $("memory-field");
  const known = new Set([...select.options].map((option) => option.value));
  for (const field of memoryFields(state.gauges)) {
    if (!known.has(field)) select.append(el("option", { value: field }, FIELD_NAMES[field]));
  }
  const planned = job.estimate?.stages ? Math.max(...job.estimate.stages.map((stage) => stage.memory_bytes)) : null;
  return select.value ? memoryLines(select.value, state.gauges, planned, page.view.window()) : { columns: [[]], lines: [], left: 0 };
}
