// Token colours as canvas can use them, and what all charts share.

const resolved = new Map(); // of the theme that is on
document.addEventListener("themechange", () => resolved.clear());

/** The computed colour of a token: light-dark() has to be resolved by an element that uses it. */
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

const FONT = "12px system-ui, sans-serif";

export function axis(label, values, size) {
  return {
    label: label ?? undefined,
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

/** Filled squares in the legend, in the line's colour. */
export const MARKERS = { width: 0, fill: (chart, index) => chart.series[index].stroke(chart, index) };

/** Redraw with other colours when the theme changes, and follow the width of the container, until what it returns is called. */
export function keepFitting(container, rebuild, current) {
  document.addEventListener("themechange", rebuild);
  const observer = new ResizeObserver(() => {
    const width = Math.floor(container.clientWidth);
    const chart = current();
    if (chart && width > 0 && chart.width !== width) chart.setSize({ width, height: chart.height });
  });
  observer.observe(container);
  return () => {
    document.removeEventListener("themechange", rebuild);
    observer.disconnect();
  };
}
