// uPlot with our colours, units and sizes; redrawn when the theme changes.
import uPlot from "../vendor/uplot/uPlot.esm.js";
import { resolvedColor } from "./dom.js";

const HEIGHT = 260;
const BINARY_STEPS = [...Array(51).keys()].map((power) => 2 ** power);
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

function axes(xLabel, yLabel, yFormat, xTime, yBinary) {
  const ink = resolvedColor("--ink-soft");
  const line = resolvedColor("--line");
  const common = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, labelSize: 18 };
  return [
    { ...common, label: xLabel, values: (_u, ticks) => ticks.map((v) => (xTime ? clock.format(v * 1000) : v)), ...(xTime ? { incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600] } : {}) },
    { ...common, label: yLabel, size: 84, labelGap: 6, ...(yBinary ? { incrs: BINARY_STEPS } : {}), values: (_u, ticks) => ticks.map((v) => yFormat(v)) },
  ];
}

/** series: [{label, token, points?}]; `data()` gives uPlot's arrays, x first. */
export class Chart {
  constructor(node, { series, data, xLabel, yLabel, yFormat, xTime = false, yFromZero = false, yBinary = false }) {
    this.node = node;
    this.options = { series, data, xLabel, yLabel, yFormat, xTime, yFromZero, yBinary };
    this.build();
    new ResizeObserver(() => this.plot.setSize({ width: node.clientWidth, height: HEIGHT })).observe(node);
    document.addEventListener("themechange", () => this.build());
  }

  build() {
    const { series, data, xLabel, yLabel, yFormat, xTime, yFromZero, yBinary } = this.options;
    this.plot?.destroy();
    const lines = series.map((s) => ({
      label: s.label,
      stroke: resolvedColor(s.token),
      width: 1.5,
      points: { show: s.points ?? false, size: 6 },
      spanGaps: true,
      value: (_u, v) => (v === null || v === undefined ? "–" : yFormat(v)),
    }));
    this.plot = new uPlot({
      width: this.node.clientWidth,
      height: HEIGHT,
      scales: { x: { time: xTime }, y: yFromZero ? { range: (_u, _min, max) => [0, max > 0 ? max * 1.05 : 1] } : {} },
      axes: axes(xLabel, yLabel, yFormat, xTime, yBinary),
      series: [xTime ? { label: "time", value: (_u, v) => (v ? clock.format(v * 1000) : "–") } : { label: xLabel }, ...lines],
      cursor: { y: false },
    }, data(), this.node);
  }

  setSeries(series) {
    if (JSON.stringify(series) === JSON.stringify(this.options.series)) return;
    this.options.series = series;
    this.build();
  }

  update() {
    this.plot.setData(this.options.data());
  }
}
