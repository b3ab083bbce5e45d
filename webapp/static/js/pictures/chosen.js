// The layout that the planner chose for "auto", with the reason and the runners-up.
import { el } from "../dom.js";
import { bytes, duration } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const signed = (share) => (Math.abs(share) < 5e-4 ? "0.0%" : `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)}%`);

export function chosenLayout(chosen) {
  const first = el("tr", {}, rowHead(null, chosen.words), cell(duration(chosen.step_s)), cell(""), cell(bytes(chosen.memory_bytes)), cell(""));
  const rows = chosen.runners_up.map((other) =>
    el("tr", {}, rowHead(null, other.words), cell(duration(other.step_s)), cell(signed(other.slower)), cell(bytes(other.memory_bytes)), cell(signed(other.heavier))),
  );
  const head = [th("layout"), th("step time", true), th("extra time", true), th("memory", true), th("extra memory", true)];
  return [el("p", {}, chosen.why), scrolling(head, [first, ...rows])];
}
