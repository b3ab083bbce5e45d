// Time or bandwidth of each collective over the message size. Both axes are logarithmic.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { byteRate, bytes, duration, opName } from "../format.js";
import { ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting, legendValue } from "./theme.js";
import { roundTicks } from "./ticks.js";

const HEIGHT = 280;
const MEASURES = {
  seconds: { label: "time per call", format: duration },
  algbw: { label: "algorithmic bandwidth", format: byteRate },
  busbw: { label: "bus bandwidth", format: byteRate },
};

/** Return draw(points, measure). Points are {op, payload_bytes, seconds, algbw, busbw}. */
export function collectivesChart(container) {
  let chart = null;
  let shown = null;

  function build() {
    if (!shown) return;
    chart?.destroy();
    const { ops, data, label, format } = shown;
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3 } },
      axes: [
        axis("message size", roundTicks((tick) => Math.log2(tick) % 4 === 0, bytes), 36),
        axis(label, (_, ticks) => ticks.map((tick) => (tick ? format(tick) : "")), 80),
      ],
      series: [
        { label: "message size", value: legendValue(bytes) },
        ...ops.map((op, index) => ({
          label: opName(op),
          stroke: color(`--series-${index}`),
          width: 1.5,
          points: { show: true, size: 6 },
          value: legendValue(format),
        })),
      ],
    };
    chart = new uPlot(options, data, container);
  }

  keepFitting(container, build, () => chart);
  return (points, measure = "seconds") => {
    const sizes = [...new Set(points.map((p) => p.payload_bytes))].sort((a, b) => a - b);
    const ops = [...new Set(points.map((p) => p.op))];
    const of = (op) => sizes.map((size) => points.find((p) => p.op === op && p.payload_bytes === size)?.[measure] ?? null);
    const first = !shown;
    shown = { ops, data: [sizes, ...ops.map(of)], ...MEASURES[measure] };
    build();
    if (first) ownKeys(container, () => chart);
  };
}
