// The traffic panel: its choices and its notes.
import { MOST_LINES, ranksDrawn, trafficChart, trafficLines } from "../charts/traffic.js";
import { el } from "../dom.js";
import { duration, integer, opName } from "../format.js";
import { rankWords } from "../timeline/tables.js";
import { leftOut } from "./tables.js";

const MANY_RANKS = 8; // more ranks are drawn by axis

export function trafficView(section, page, redraw) {
  const [by, axis, op] = ["#by", "#by-axis", "#by-op"].map((id) => section.querySelector(id));
  const note = section.querySelector("#traffic-note");
  const draw = trafficChart(section.querySelector("#traffic-chart"), page);
  let chosen = false;
  for (const choice of [by, axis, op]) choice.addEventListener("change", redraw);
  by.addEventListener("change", () => (chosen = true));

  function accepts(key) {
    const [keyAxis, keyOp] = key.split("/");
    return (!axis.value || axis.value === keyAxis) && (!op.value || op.value === keyOp);
  }

  function binsFor(state) {
    const times = state.recent.times();
    return times.length > 0 && page.view.window()[0] >= times[0] ? state.recent : state.whole;
  }

  return (job, state) => {
    const bins = binsFor(state);
    if (!chosen && job.world_size > MANY_RANKS) by.value = "axis";
    const keys = new Set([...state.whole.rows.values()].flatMap((row) => [...row.keys()]));
    fill(axis, [...new Set([...keys].map((key) => key.split("/")[0]))].sort(), (value) => `axis ${value}`);
    fill(op, [...new Set([...keys].map((key) => key.split("/")[1]))].sort(), opName);
    if (keys.size > 0) draw(trafficLines(bins, by.value, accepts, !job.finished));
    const words = notes(bins, by.value, state);
    if (note.textContent !== words) [note.textContent, note.title] = [words, words];
  };
}

function fill(select, values, name) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value)) select.append(el("option", { value }, name(value)));
}

function notes(bins, by, state) {
  const dropped = [...state.ranks.values()].reduce((sum, rank) => sum + rank.dropped, 0);
  const sentences = [];
  if (bins.length > 0) sentences.push(`The chart shows the payload bytes of issued collectives, averaged over ${duration(bins.width)}${by === "axis" ? " and summed over all ranks" : ""}.`);
  if (by !== "axis" && bins.rows.size > MOST_LINES) sentences.push(`The chart shows ranks ${rankWords(ranksDrawn(bins))}, the first ${MOST_LINES} of ${integer(bins.rows.size)}. The tables include all ranks.`);
  if (dropped > 0) sentences.push(`${integer(dropped)} timing records of collectives were dropped. Byte counters are exact.`);
  if (state.fromSummary) sentences.push("Totals come from the stored summary of the run.");
  if (state.cellsLeftOut > 0) sentences.push(`${leftOut(state)}. Sums exclude the omitted counters.`);
  return sentences.join(" ");
}
