// Which row each event of a step stands in: for every rank its compute, then its axes; and which lie under a point. Pure.
import { byAxis } from "../collectives.js";

export const COMPUTE = "compute";

/** Rows in order: {rank, name, first: of its rank, events: sorted by `from`, longest: of any event so far}. */
export function rowsOf(step) {
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
    lists.forEach(([name, events], place) => rows.push({ rank, name, first: place === 0, events, ends: endsOf(events) }));
  }
  return rows;
}

/** The latest end of each event and all before it: what has not ended yet may have begun long ago. */
function endsOf(events) {
  const ends = new Float64Array(events.length);
  let latest = -Infinity;
  events.forEach((event, i) => {
    latest = Math.max(latest, event.to);
    ends[i] = latest;
  });
  return ends;
}

/** The first place whose value is not below `time` in a sorted list. */
export function firstFrom(length, valueAt, time) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Places [first, beyond last) of a row's events that touch [from, to]. */
export function within(row, from, to) {
  const first = firstFrom(row.events.length, (i) => row.ends[i], from);
  return [first, firstFrom(row.events.length, (i) => row.events[i].from, to)];
}

/** The event of a row at a time, the one that began last; `slack` seconds beside it still hit. */
export function eventAt(row, time, slack) {
  const [first, beyond] = within(row, time - slack, time + slack);
  for (let i = beyond - 1; i >= first; i -= 1) if (row.events[i].to + slack >= time) return row.events[i];
  return null;
}
