// The panel "Every rank over time": a row a rank, a column a bin, up to thousands of ranks on one canvas.
import { byteRate, duration, exactTime, integer } from "../format.js";
import { cellsOf } from "./cells.js";
import { hostBorders, fill } from "./pairs.js";
import { heatMap, legend } from "./map.js";
import { multiples } from "./multiples.js";

const share = (value) => (Number.isNaN(value) ? "not known" : `${(100 * value).toFixed(1)} %`);
const FIGURES = {
  bytes: { words: (value) => (Number.isNaN(value) ? "not known" : byteRate(value)), token: "--axis-dp", note: "Payload bytes issued per second" },
  still: { words: share, token: "--axis-tp", note: "Share of its time that a rank's training thread stood still for collectives, as its steps tell" },
};

function nothing(job, state) {
  if (!job.finished) return "Waiting for the first collective.";
  return state.fromSummary ? "When each rank sent what is no longer kept." : "The run ended without a collective.";
}

/** Returns show(job, state, range): `range` {from, to} in unix seconds, nulls for the whole run. */
export function timePanel(panel) {
  const $ = (id) => panel.querySelector(`#${id}`);
  let [ranks, drawn, what, figure] = [[], null, "", FIGURES.bytes];
  let note = "";
  const told = $("heat-time-told");
  const words = (row, column) => {
    const value = figure.words(drawn.cells[row * drawn.columns + column]);
    return `rank ${ranks[row]} · ${exactTime(new Date(1000 * drawn.times[column]))} · ${value} over ${duration(drawn.width)}`;
  };
  const options = { label: "Each rank over time. Arrow keys walk the cells.", told: words, onTell: (text) => (told.textContent = text ?? note), tall: true };
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
      empty.textContent = what === "still" ? "No step has told what its ranks stood still for." : nothing(job, state);
      return;
    }
    ranks = [...bins.rows.keys()].sort((a, b) => a - b);
    fill($("heat-axis"), [...bins.rows.values()].flatMap((row) => [...row.keys()].map((key) => key.split("/")[0])));
    drawn = { ...cellsOf(bins, ranks, accepts, { ...range, filling: !job.finished }), width: bins.width };
    if (drawn.columns === 0) return;
    const most = what === "still" ? Math.max(drawn.most, 0.01) : drawn.most;
    const borders = hostBorders(job.members).map((rank) => ranks.findIndex((one) => one >= rank)).filter((row) => row > 0);
    map.show(drawn.cells, { rows: ranks.length, columns: drawn.columns, most, borders: { rows: borders, columns: [] } });
    note = `${figure.note}, over ${duration(bins.width)}. ${integer(ranks.length)} ${ranks.length === 1 ? "rank" : "ranks"} from above, ${exactTime(new Date(1000 * drawn.times[0]))} to ${exactTime(new Date(1000 * drawn.times.at(-1)))}.`;
    if (!map.pointed()) told.textContent = note;
    legend($("heat-time-legend"), most, figure.words, figure.token);
    small(bins, drawn, ranks, figure);
  };
}
