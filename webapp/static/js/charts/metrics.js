// One chart per metric of a script, with a line per rank.
import { NUMBERED } from "../fold/metrics.js";
import { drawLines, findFaults, fit, formatMetric, sortPoints, stepsAndTimes } from "./metriclines.js";
import { plot } from "./plot.js";
import { MOST_LINES } from "./traffic.js";

const HEIGHT = 158;

/** Return draw(group, steps, weight) for a metric. `steps` chooses the axis, and `weight` the smoothing. */
export function metricChart(container, page, name, isNumbered) {
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

export const isNumberedGroup = ({ sources }) => sources.includes(NUMBERED);
