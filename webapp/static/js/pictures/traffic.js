// Planned traffic per step by axis, between and inside nodes.
import { byAxis } from "../collectives.js";
import { el, stackedBar } from "../dom.js";
import { decimalBytes, exactBytes } from "../format.js";
import { cell, columns, rowHead, scrolling, stageHead, th } from "./table.js";

/**
 * @param {Estimate} estimate
 */
export function trafficPicture(estimate) {
  const { stages, cluster } = estimate;
  const total = (stage) => Object.values(stage.step_bytes).reduce((sum, value) => sum + value, 0);
  const busiest = stages.reduce((most, other) => (total(other) > total(most) ? other : most));
  const axes = [...new Set(stages.flatMap((s) => Object.keys(s.step_bytes)))].filter((axis) => stages.some((s) => s.step_bytes[axis] > 0));
  axes.sort(byAxis);
  if (axes.length === 0) return [el("p", { className: "note" }, "A single rank sends no traffic.")];
  const parts = axes.map((axis) => ({
    token: `--axis-${axis}`,
    value: busiest.step_bytes[axis] ?? 0,
    title: `${axis}: ${exactBytes(busiest.step_bytes[axis] ?? 0)}`,
  }));
  const shown = columns(stages);
  const rows = axes.map((axis) =>
    el(
      "tr",
      {},
      rowHead(`--axis-${axis}`, axis),
      ...shown.map((s) => cell(decimalBytes(s.step_bytes[axis] ?? 0), exactBytes(s.step_bytes[axis] ?? 0))),
      el("td", {}, cluster.crossing[axis] === undefined ? "" : cluster.crossing[axis] ? "between nodes" : "inside a node"),
    ),
  );
  const head = [th("axis"), ...stageHead(shown, stages), th("path")];
  return [stackedBar(parts, "Payload bytes per step, by axis"), scrolling(head, rows)];
}
