// Rows of a timeline: per rank compute, then one row per axis. Finds events at a time. Pure.
import { byAxis } from "../collectives.js";

export const COMPUTE = "compute";

/** Return rows {rank, name, first (row of the rank), events (sorted by `from`), ends}. */
export function arrangeRows(step) {
  const rows = [];
  for (const [rank, own] of step.ranks) {
    const axes = new Map();
    for (const call of own.calls) {
      const { axis } = step.groups[call.group];
      if (!axes.has(axis)) axes.set(axis, []);
      axes.get(axis).push(call);
    }
    const names = [...axes.keys()].sort((a, b) => byAxis(a, b) || a.localeCompare(b));
    const lists = [[COMPUTE, own.spans], ...names.map((name) => [name, axes.get(name)])];
    lists.forEach(([name, events], place) => rows.push({ rank, name, first: place === 0, events, ends: findEnds(events) }));
  }
  return rows;
}

/** Return the running maximum of event ends, because a long event can outlast later events. */
function findEnds(events) {
  const ends = new Float64Array(events.length);
  let latest = -Infinity;
  events.forEach((event, i) => {
    latest = Math.max(latest, event.to);
    ends[i] = latest;
  });
  return ends;
}

/** Return the first index of a sorted list whose value is at least `time`. */
export function firstFrom(length, valueAt, time) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the index range [first, last + 1] of the events of a row that touch [from, to]. */
export function within(row, from, to) {
  const first = firstFrom(row.events.length, (i) => row.ends[i], from);
  return [first, firstFrom(row.events.length, (i) => row.events[i].from, to)];
}

/** Return the event of a row that began last before a time, with a tolerance of `slack` seconds. */
export function eventAt(row, time, slack) {
  const [first, beyond] = within(row, time - slack, time + slack);
  for (let i = beyond - 1; i >= first; i -= 1) if (row.events[i].to + slack >= time) return row.events[i];
  return null;
}
