// A moment of a run in words: its step, its time, and what happened near it.
import { exactTime, integer } from "../format.js";
import { markWords } from "./marks.js";
import { stepAt } from "./ticks.js";

const NEAR = 0.01; // of the window: a mark so near is told with it

/** `page`: {view, curve, marks}; `at`: unix seconds. */
export function momentWords(at, page) {
  const [from, to] = page.view.window();
  const near = page.marks.filter((mark) => Math.abs(mark.time - at) <= NEAR * (to - from)).map(markWords);
  const step = stepAt(page.curve, at);
  return [step === null ? null : `step ${integer(step)}`, exactTime(new Date(at * 1000)), ...near].filter(Boolean).join(" · ");
}
