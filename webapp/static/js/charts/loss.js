// Loss by step: training as a line, validation as dots joined by a line.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { integer, loss } from "../format.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";

const HEIGHT = 260;

export function lossChart(container) {
  let chart = null;
  let data = [[], [], []];

  function build() {
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false }, y: { range: (_, low, high) => padded(low, high) } },
      axes: [
        axis("optimiser step", (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? integer(tick) : "")), 36),
        axis("loss (nats per token)", (_, ticks) => ticks.map((tick) => loss(tick, 2)), 64),
      ],
      series: [
        { label: "step", value: (_, value) => (value === null ? "–" : integer(value)) },
        {
          label: "train",
          stroke: color("--series-0"),
          width: 1.5,
          points: { show: () => data[0].length < 2 },
          value: (_, value) => loss(value),
        },
        {
          label: "validation",
          stroke: color("--series-1"),
          width: 1.5,
          spanGaps: true,
          points: { show: true, size: 7 },
          value: (_, value) => loss(value),
        },
      ],
    };
    chart = new uPlot(options, data, container);
  }

  keepFitting(container, () => chart && build(), () => chart);
  return (losses, evalLosses) => {
    const steps = [...new Set([...losses.keys(), ...evalLosses.keys()])].sort((a, b) => a - b);
    const of = (points) => steps.map((step) => points.get(step) ?? null);
    data = [steps, of(losses), of(evalLosses)];
    if (steps.length === 0) return;
    const waiting = container.querySelector(".waiting");
    if (waiting) waiting.remove();
    if (!chart) build();
    else chart.setData(data);
  };
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const margin = Math.max((high - low) * 0.08, 0.02);
  return [low - margin, high + margin];
}
