// The layout that took the place of "auto": why it is the first, and what came next.
import { el } from "../dom.js";
import { bytes, duration } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const signed = (share) => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)} %`;

export function chosenLayout(chosen) {
  const first = el("tr", {}, rowHead(null, chosen.words), cell(duration(chosen.step_s)), cell(""), cell(bytes(chosen.memory_bytes)), cell(""));
  const rows = chosen.runners_up.map((other) =>
    el("tr", {}, rowHead(null, other.words), cell(duration(other.step_s)), cell(signed(other.slower)), cell(bytes(other.memory_bytes)), cell(signed(other.heavier))),
  );
  const head = [th("layout"), th("a step", true), th("slower", true), th("memory", true), th("heavier", true)];
  return [el("p", {}, chosen.why), scrolling(head, [first, ...rows])];
}
