// The time range with data. Pure.

/**
 * Return [first, last] of all charts in unix seconds, or null without data. The range begins with traffic or steps. Gauges
 * arrive while ranks still import, so they count only without traffic and steps.
 */
export function getExtent(state) {
  const steps = [...state.steps.values()].map(({ time }) => time);
  const sent = state.whole.length > 0 ? [state.whole.times()[0]] : [];
  const ends = [...state.gauges.values()].flatMap(({ time }) => (time.length > 0 ? [time[0], time.at(-1)] : []));
  const begins = sent.length + steps.length > 0 ? [...sent, ...steps.slice(0, 1)] : ends;
  if (begins.length === 0) return null;
  const first = Math.min(...begins);
  return [first, state.time ?? [...steps, ...ends].reduce((most, time) => Math.max(most, time), first)];
}
