// The Pareto front of a search: what more time buys in memory. Both axes are logarithmic.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { bytes, decimalBytes, duration } from "../format.js";
import { ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";

const HEIGHT = 260;

/** Returns what takes it away, for who draws another in its stead. */
export function paretoChart(container, front, capacity) {
  const data = [front.map((f) => f.step_s), front.map((f) => f.memory_bytes), front.map(() => capacity)];
  let chart = null;

  function build() {
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false, distr: 3 }, y: { distr: 3 } },
      axes: [
        axis("step time", (_, ticks) => ticks.map((tick) => (tick ? duration(tick) : "")), 36),
        axis("memory of the fullest rank", (_, ticks) => ticks.map((tick) => (tick ? decimalBytes(tick) : "")), 80),
      ],
      series: [
        { label: "step", value: (_, value) => duration(value) },
        { label: "least memory at that speed", stroke: color("--series-0"), width: 1.5, points: { show: true, size: 7 }, value: (_, value) => bytes(value) },
        { label: "device", stroke: color("--bad"), width: 1, dash: [6, 4], points: { show: false }, value: (_, value) => bytes(value) },
      ],
    };
    chart = new uPlot(options, data, container);
  }

  build();
  ownKeys(container, () => chart);
  const letGo = keepFitting(container, build, () => chart);
  return () => {
    letGo();
    chart.destroy();
  };
}
