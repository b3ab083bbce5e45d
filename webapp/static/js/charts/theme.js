// Colors of design tokens for canvas, and settings that all charts share.
import { spacedTicks } from "./ticks.js";

const resolved = new Map(); // colors of the current theme
document.addEventListener("themechange", () => resolved.clear());

/** Return the computed color of a token. Only an element that uses light-dark() resolves it. */
export function color(token) {
  if (!resolved.has(token)) resolved.set(token, resolve(token));
  return resolved.get(token);
}

function resolve(token) {
  const probe = document.createElement("span");
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const sentenceCase = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const FONT = "12px system-ui, sans-serif";

export function axis(label, values, size) {
  return {
    label: label ? sentenceCase(label) : undefined,
    values,
    size,
    labelSize: label ? 18 : 0,
    labelGap: 2,
    labelFont: FONT,
    font: FONT,
    stroke: color("--ink-faint"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { stroke: color("--line"), width: 1, size: 4 },
  };
}

const TICK_PX = 72; // least distance between ticks of the x axis

/** Return the `splits` of an x axis, with space between the labels. `getLabels` are the `values` of the axis. */
export const xSplits = (splits, getLabels) => (chart, _, min, max) => {
  const width = chart.bbox.width / (devicePixelRatio || 1);
  const measure = (text) => measureText(chart.ctx, text);
  return spacedTicks(splits(min, max, width / TICK_PX), { getLabels, measure, pxPerUnit: width / (max - min) });
};

function measureText(context, text) {
  context.save();
  context.font = FONT;
  const { width } = context.measureText(text);
  context.restore();
  return width;
}

/** Format the value at the cursor for the legend. Without a cursor, format the last value of the line. */
export const legendValue = (format) => (chart, value, line, index) => {
  const shown = index === null || index === undefined ? chart.data[line].findLast((one) => one !== null && one !== undefined) : value;
  return shown === null || shown === undefined ? "–" : format(shown);
};

/** Legend markers: filled squares in the color of the line. */
export const MARKERS = { width: 0, fill: (chart, index) => chart.series[index].stroke(chart, index) };

/** Rebuild a chart when the theme changes, and fit the chart to the container. Call the returned function to stop. */
export function keepFitting(container, rebuild, current, getHeight = (chart) => chart.height) {
  document.addEventListener("themechange", rebuild);
  const observer = new ResizeObserver(() => {
    const width = Math.floor(container.clientWidth);
    const chart = current();
    if (!chart || width === 0) return;
    const height = getHeight(chart);
    if (chart.width !== width || chart.height !== height) chart.setSize({ width, height });
  });
  observer.observe(container);
  return () => {
    document.removeEventListener("themechange", rebuild);
    observer.disconnect();
  };
}
