// The visible range of a step, in seconds. Pure.

const CLOSEST_S = 1e-6;

export const whole = (seconds) => ({ from: 0, to: seconds });

/** Zoom around a moment that keeps its place. Factor 2 shows half the range. */
export function zoomed(view, seconds, factor, about = (view.from + view.to) / 2) {
  const width = Math.min(seconds, Math.max(CLOSEST_S, (view.to - view.from) / factor));
  const share = (about - view.from) / (view.to - view.from);
  return moved({ from: about - share * width, to: about + (1 - share) * width }, seconds, 0);
}

/** Move by seconds, within the step. */
export function moved(view, seconds, by) {
  const width = Math.min(seconds, view.to - view.from);
  const from = Math.max(0, Math.min(seconds - width, view.from + by));
  return { from, to: from + width };
}
