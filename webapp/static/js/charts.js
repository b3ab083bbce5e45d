// uPlot with our colours, units and sizes; redrawn when the theme changes.
import uPlot from "../vendor/uplot/uPlot.esm.js";
import { resolvedColor } from "./dom.js";

const HEIGHT = 260;

function axes(xLabel, yLabel, yFormat, xTime) {
  const ink = resolvedColor("--ink-soft");
  const line = resolvedColor("--line");
  const common = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, labelSize: 18 };
  return [
    { ...common, label: xLabel, ...(xTime ? {} : { values: (_u, ticks) => ticks.map((v) => v) }) },
    { ...common, label: yLabel, size: 76, values: (_u, ticks) => ticks.map((v) => yFormat(v)) },
  ];
}

/** series: [{label, token, points?}]; `data()` gives uPlot's arrays, x first. */
export class Chart {
  constructor(node, { series, data, xLabel, yLabel, yFormat, xTime = false, yFromZero = false }) {
    this.node = node;
    this.options = { series, data, xLabel, yLabel, yFormat, xTime, yFromZero };
    this.build();
    new ResizeObserver(() => this.plot.setSize({ width: node.clientWidth, height: HEIGHT })).observe(node);
    document.addEventListener("themechange", () => this.build());
  }

  build() {
    const { series, data, xLabel, yLabel, yFormat, xTime, yFromZero } = this.options;
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
      axes: axes(xLabel, yLabel, yFormat, xTime),
      series: [xTime ? { label: "time" } : { label: xLabel }, ...lines],
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
