// Time of each collective over its payload, both logarithmic.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { bytes, duration, opName } from "../format.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";

const HEIGHT = 280;

export function collectivesChart(container, points) {
  const sizes = [...new Set(points.map((p) => p.payload_bytes))].sort((a, b) => a - b);
  const ops = [...new Set(points.map((p) => p.op))];
  const of = (op) => sizes.map((size) => points.find((p) => p.op === op && p.payload_bytes === size)?.seconds ?? null);
  const data = [sizes, ...ops.map(of)];
  let chart = null;

  function build() {
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3 } },
      axes: [
        axis("payload", (_, ticks) => ticks.map((tick) => (tick && Math.log2(tick) % 4 === 0 ? bytes(tick) : "")), 36),
        axis("time of a call", (_, ticks) => ticks.map((tick) => (tick ? duration(tick) : "")), 80),
      ],
      series: [
        { label: "payload", value: (_, value) => bytes(value) },
        ...ops.map((op, index) => ({
          label: opName(op),
          stroke: color(`--series-${index}`),
          width: 1.5,
          points: { show: true, size: 6 },
          value: (_, value) => duration(value),
        })),
      ],
    };
    chart = new uPlot(options, data, container);
  }

  build();
  keepFitting(container, build, () => chart);
}
