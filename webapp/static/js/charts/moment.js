// Describes a moment of a run: step, time, and events nearby.
import { exactTime, integer } from "../format.js";
import { markWords } from "./marks.js";
import { stepAt } from "./ticks.js";

const NEAR = 0.01; // share of the range, for marks that are included

/** Describe the moment `at` (unix seconds). `page` is {view, curve, marks}. */
export function momentWords(at, page) {
  const [from, to] = page.view.window();
  const near = page.marks.filter((mark) => Math.abs(mark.time - at) <= NEAR * (to - from)).map(markWords);
  const step = stepAt(page.curve, at);
  return [step === null ? null : `step ${integer(step)}`, exactTime(new Date(at * 1000)), ...near].filter(Boolean).join(" · ");
}
