// The rank heatmap: one row per rank, one column per time bin, on one canvas.
import { byteRate, duration, exactTime, integer } from "../format.js";
import { computeCells } from "./cells.js";
import { clockTicks } from "../charts/ticks.js";
import { hostBorders, fill } from "./pairs.js";
import { heatMap, legend } from "./map.js";
import { multiples } from "./multiples.js";

const share = (value) => (Number.isNaN(value) ? "unknown" : `${(100 * value).toFixed(1)}%`);
const FIGURES = {
  bytes: { words: (value) => (Number.isNaN(value) ? "unknown" : byteRate(value)), token: "--axis-dp", note: "Payload bytes per second" },
  still: { words: share, token: "--axis-tp", note: "Share of time in which the training thread waits for collectives" },
};

function nothing(job, state) {
  if (state.unknown) return state.unknown.bytes;
  if (!job.finished) return "Waiting for the first collective.";
  return state.fromSummary ? "The stored traffic history of this run was deleted." : "The run ended without a collective.";
}

const SHORT_S = 10; // a shorter span is labeled by the time since its start

function timeAxis(times) {
  if (times.at(-1) - times[0] < SHORT_S) return { title: "Time since start", words: (column) => duration(times[column] - times[0]) };
  const clock = clockTicks(null, times.map(Math.round));
  return { title: "Time", words: (column) => clock[column].split("\n")[0] };
}

/** Return show(job, state, range). `range` is {from, to} in unix seconds, nulls for the whole run. */
export function timePanel(panel) {
  const $ = (id) => panel.querySelector(`#${id}`);
  /** @type {number[]} */
  let ranks = [];
  /** @type {any} */
  let drawn = null;
  let [what, figure] = ["", FIGURES.bytes];
  let note = "";
  const output = $("heat-time-status");
  const words = (row, column) => {
    const value = figure.words(drawn.cells[row * drawn.columns + column]);
    return `rank ${ranks[row]} · ${exactTime(new Date(1000 * drawn.times[column]))} · ${value} over ${duration(drawn.width)}`;
  };
  const options = { label: "Rank heatmap. Arrow keys move between cells.", describe: words, onDescribe: (text) => (output.textContent = text ?? note), tall: true };
  let map = null;
  const small = multiples($("multiples"), $("multiples-more"));

  return (job, state, range = {}) => {
    const chosen = $("heat-what").value;
    if (!map || chosen !== what) {
      [what, figure] = [chosen, FIGURES[chosen]];
      map?.destroy();
      map = heatMap($("heat-time-map"), { ...options, token: figure.token });
    }
    const axis = $("heat-axis").value;
    const accepts = (key) => !axis || key.split("/")[0] === axis;
    const near = range.from !== null && range.from !== undefined && state.recent.length > 0 && range.from >= state.recent.times()[0];
    const both = what === "still" ? state.still : state;
    const bins = both && (near ? both.recent : both.whole);
    const known = bins && bins.rows.size > 0 && bins.length > 1;
    $("heat-time-map").hidden = !known;
    const empty = panel.querySelector("[data-empty]");
    empty.hidden = known;
    if (!known) {
      empty.textContent = what === "still" ? (state.unknown?.still ?? "No rank has reported stall times yet.") : nothing(job, state);
      return;
    }
    ranks = [...bins.rows.keys()].sort((a, b) => a - b);
    fill($("heat-axis"), [...bins.rows.values()].flatMap((row) => [...row.keys()].map((key) => key.split("/")[0])));
    drawn = { ...computeCells(bins, ranks, accepts, { ...range, filling: !job.finished }), width: bins.width };
    if (drawn.columns === 0) return;
    const most = what === "still" ? Math.max(drawn.most, 0.01) : drawn.most;
    const borders = hostBorders(job.members).map((rank) => ranks.findIndex((one) => one >= rank)).filter((row) => row > 0);
    const axes = { rows: { title: "Rank", words: (row) => integer(ranks[row]) }, columns: timeAxis(drawn.times) };
    map.show(drawn.cells, { rows: ranks.length, columns: drawn.columns, most, borders: { rows: borders, columns: [] }, axes });
    note = `${figure.note}, mean over ${duration(bins.width)}, from ${exactTime(new Date(1000 * drawn.times[0]))} to ${exactTime(new Date(1000 * drawn.times.at(-1)))}.`;
    if (!map.pointed()) output.textContent = note;
    legend($("heat-time-legend"), most, figure.words, figure.token, figure.note.toLowerCase());
    small(bins, drawn, ranks, figure);
  };
}
