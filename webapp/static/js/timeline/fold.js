// Keeps the steps that ranks told event by event, and how long each rank stood still over time. Pure.
import { Bins } from "../rates.js";

export const MOST_STEPS = 24; // kept in the page
export const MOST_EVENTS = 400_000; // of all of them together

const size = (item) => item.calls.op.length + item.spans.work.length;

/** A step of one rank: the oldest steps go where there are too many. */
export function foldTimeline(state, item, node) {
  state.timelines ??= new Map(); // step -> rank -> {item, node}
  const steps = state.timelines;
  if (!steps.has(item.step)) steps.set(item.step, new Map());
  steps.get(item.step).set(item.rank, { item, node });
  const order = [...steps.keys()].sort((a, b) => a - b);
  let events = 0;
  for (const ranks of steps.values()) for (const told of ranks.values()) events += size(told.item);
  while (order.length > 1 && (order.length > MOST_STEPS || events > MOST_EVENTS)) {
    const oldest = order.shift();
    for (const told of steps.get(oldest).values()) events -= size(told.item);
    steps.delete(oldest);
  }
}

/** Wraps the fold of step items: what a rank stood still in its step, by axis, spread over the time that it took. */
export const alsoStoodStill = (fold) => (state, item, node) => {
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

/** Steps at hand, newest first, each with how many ranks told of it. */
export function stepsAtHand(state) {
  return [...(state.timelines ?? [])].map(([step, ranks]) => ({ step, ranks: ranks.size })).sort((a, b) => b.step - a.step);
}
