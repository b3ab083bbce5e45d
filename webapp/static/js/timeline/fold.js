// Keeps traced steps, and the time that each rank stalls. Pure.
import { Bins } from "../rates.js";

export const MOST_STEPS = 24; // in the page
export const MOST_EVENTS = 400_000; // of all these steps together

const size = (item) => item.calls.op.length + item.spans.work.length;

/** Add a traced step of one rank. Drop the oldest steps above the limits. */
export function foldTimeline(state, item, node) {
  state.timelines ??= new Map(); // step -> rank -> {item, node}
  const steps = state.timelines;
  if (!steps.has(item.step)) steps.set(item.step, new Map());
  steps.get(item.step).set(item.rank, { item, node });
  const order = [...steps.keys()].sort((a, b) => a - b);
  let events = 0;
  for (const ranks of steps.values()) for (const entry of ranks.values()) events += size(entry.item);
  while (order.length > 1 && (order.length > MOST_STEPS || events > MOST_EVENTS)) {
    const oldest = order.shift();
    for (const entry of steps.get(oldest).values()) events -= size(entry.item);
    steps.delete(oldest);
  }
}

/** Wrap the fold of step items. Spread the exposed communication of a step evenly over the step, by axis. */
export const withExposedTime = (fold) => (state, item, node) => {
  fold(state, item, node);
  const exposed = Object.entries(item.parts?.exposed ?? {}).filter(([, seconds]) => seconds > 0);
  if (exposed.length === 0 || !(item.step_s > 0)) return;
  state.still ??= { recent: new Bins(0.5, 121, "recent"), whole: new Bins(0.5, 1200, "whole") };
  for (const bins of Object.values(state.still)) {
    const pieces = Math.min(200, Math.max(1, Math.ceil(item.step_s / bins.width)));
    for (const [axis, seconds] of exposed) {
      for (let i = 0; i < pieces; i += 1) {
        bins.add(item.rank, `${axis}/`, item.time - (item.step_s * (pieces - 1 - i)) / pieces, seconds / pieces);
      }
    }
  }
};

/** Return the traced steps in the page, latest first, with the number of ranks. */
export function stepsAtHand(state) {
  return [...(state.timelines ?? [])].map(([step, ranks]) => ({ step, ranks: ranks.size })).sort((a, b) => b.step - a.step);
}
