// Traffic of each axis over one variable, with the current value marked. Both axes are logarithmic.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { decimalBytes, integer } from "../format.js";
import { nearest, ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";
import { roundTicks } from "./ticks.js";

const HEIGHT = 320;
const LINES = [
  ["tp", "tensor parallel", "--axis-tp"],
  ["zero3", "ZeRO-3", "--axis-world"],
  ["dp", "data parallel, ZeRO-1, and ZeRO-2", "--axis-dp"],
  ["pp", "pipeline, all boundaries", "--axis-pp"],
];

export function growthChart(container) {
  let chart = null;
  let shown = null;
  let here = 0;

  function mark(plot) {
    const x = plot.valToPos(here, "x", true);
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = color("--ink-faint");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  /** Format the value at the cursor. Without a cursor, format the value at the current setting, as in the table. */
  const atSetting = (format) => (plot, value, line, index) => {
    const shownValue = index === null || index === undefined ? plot.data[line][nearest(shown.x, here)] : value;
    return shownValue === null || shownValue === undefined ? "–" : format(shownValue);
  };

  function build() {
    if (!shown) return;
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false, distr: 3 }, y: { distr: 3 } },
      hooks: { draw: [mark] },
      axes: [
        axis(`value of ${shown.variable} (logarithmic)`, roundTicks((tick) => Math.log10(tick) % 1 === 0, integer), 36),
        axis("traffic per step", (_, ticks) => ticks.map((tick) => (tick ? decimalBytes(tick) : "")), 80),
      ],
      series: [
        { label: shown.variable, value: atSetting(integer) },
        ...LINES.map(([, label, token]) => ({ label, stroke: color(token), width: 2, points: { show: false }, value: atSetting(decimalBytes) })),
      ],
    };
    chart = new uPlot(options, [shown.x, ...LINES.map(([name]) => shown.series[name])], container);
  }

  keepFitting(container, build, () => chart);
  return (curves, value) => {
    const first = !shown;
    shown = curves;
    here = value;
    build();
    if (first) ownKeys(container, () => chart);
  };
}
