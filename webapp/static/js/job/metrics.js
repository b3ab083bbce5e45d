// The panel of the metrics that a script reports: charts, a filter, and a note about values that were left out.
import { drawLines, findFaults, fit, formatMetric, sortPoints, stepsAndTimes } from "../charts/metriclines.js";
import { plot } from "../charts/plot.js";
import { MOST_LINES } from "../charts/traffic.js";
import { el } from "../dom.js";
import { NUMBERED, groupByName, selectSeries } from "../fold/metrics.js";
import { integer } from "../format.js";

const MOST_CHARTS = 12; // without a filter
const SOURCE_WORDS = {
  SummaryWriter: "SummaryWriter.add_scalar",
  wandb: "wandb.log",
  trackio: "trackio.log",
  mlflow: "mlflow.log_metric",
  "event file": "TensorBoard event files",
  "log line": "log lines",
  "numbered log line": "log lines without a step",
};
const REASONS = {
  names: "more than 200 names, or a name over 100 characters",
  rate: "a higher rate than 400 values per second and host",
  invalid: "no number",
};

const HEIGHT = 158;

/** Return draw(group, steps, weight) for a metric. `steps` chooses the axis, and `weight` the smoothing. */
function metricChart(container, page, name, isNumbered) {
  // The script numbers its steps, so this chart has its own relation of steps and time.
  const own = { view: page.view, marks: [], curve: stepsAndTimes([]) };
  const options = { height: HEIGHT, label: name, value: formatMetric, values: (value) => formatMetric(value, 3), size: 68, range: fit };
  const update = plot(container, own, { ...options, xLabel: isNumbered ? "report" : "step" });
  return (group, steps, weight) => {
    const shown = group.lines.slice(0, MOST_LINES).map((one) => ({ rank: one.rank, points: sortPoints(one.points) }));
    own.curve = stepsAndTimes(shown);
    own.marks = findFaults(shown);
    update({ ...drawLines(shown, name, steps, weight), steps });
  };
}

const isNumberedGroup = ({ sources }) => sources.includes(NUMBERED);

/** Return draw(state, job). */
export function metricsView(panel, page, redraw) {
  const filter = panel.querySelector("[name=metric-filter]");
  const holder = panel.querySelector("[data-charts]");
  const note = panel.querySelector("[data-note]");
  const waiting = panel.querySelector(".waiting");
  const charts = new Map(); // name -> {figure, caption, draw}
  filter.addEventListener("input", redraw);
  for (const input of document.querySelectorAll("[name=curve-axis]")) input.addEventListener("change", redraw);

  function getChart(group) {
    const numbered = isNumberedGroup(group);
    const known = charts.get(group.name);
    if (known && known.numbered === numbered) return known;
    known?.figure.remove();
    const place = el("div", { className: "chart" });
    const source = el("span", { className: "note" });
    const figure = el("figure", {}, el("figcaption", {}, el("b", {}, group.name), " ", source), place);
    figure.dataset.metric = group.name;
    holder.append(figure);
    const chart = { figure, source, numbered, draw: metricChart(place, page, group.name, numbered) };
    charts.set(group.name, chart);
    return chart;
  }

  return (state) => {
    const groups = groupByName(selectSeries(state.metrics));
    const words = filter.value.trim().toLowerCase();
    const found = words ? groups.filter(({ name }) => name.toLowerCase().includes(words)) : groups;
    const shown = found.slice(0, MOST_CHARTS);
    const isOverTime = document.querySelector("[name=curve-axis]:checked")?.value === "time";
    const weight = Number(document.getElementById("smoothing")?.value ?? 0);
    filter.parentElement.hidden = groups.length <= 1;
    if (groups.length > 0) waiting?.remove();
    const names = new Set(shown.map(({ name }) => name));
    for (const [name, { figure }] of charts) figure.hidden = !names.has(name);
    for (const group of shown) {
      const chart = getChart(group);
      chart.source.textContent = describe(group);
      chart.draw(group, !isOverTime, weight);
    }
    order(holder, shown.map(({ name }) => charts.get(name).figure));
    const text = [...listHidden(found, state), ...listLeftOut(state.metricsLeftOut)].join(" ");
    if (note.textContent !== text) note.textContent = text;
  };
}

/** Return the source of a metric and its last value. */
function describe({ lines, sources }) {
  const from = sources.map((source) => SOURCE_WORDS[source] ?? source).join(" and ");
  const last = [...lines[0].points.values()].at(-1);
  const value = last.words ? { nan: "NaN", inf: "infinite", "-inf": "negative infinity" }[last.words] : formatMetric(last.value);
  const ranks = lines.length > MOST_LINES ? ` · first ${MOST_LINES} of ${integer(lines.length)} ranks` : "";
  return `${value} · from ${from}${ranks}`;
}

function listHidden(found, { hiddenSeries }) {
  const hidden = found.length - MOST_CHARTS;
  const words = [];
  if (hidden > 0) words.push(`${integer(hidden)} more ${hidden === 1 ? "metric is" : "metrics are"} hidden. Filter by name to show others.`);
  if (hiddenSeries > 0) words.push(`${integer(hiddenSeries)} series of further ranks or names are not shown.`);
  return words;
}

function listLeftOut(leftOut) {
  return Object.entries(REASONS).flatMap(([reason, why]) => {
    const count = [...leftOut.values()].reduce((sum, counts) => sum + counts[reason], 0);
    return count > 0 ? [`${integer(count)} values were left out (${why}).`] : [];
  });
}

/** Put the figures in order, if they are not. */
function order(holder, figures) {
  const current = [...holder.children].filter(({ hidden }) => !hidden);
  if (figures.some((figure, index) => current[index] !== figure)) holder.append(...figures);
}
