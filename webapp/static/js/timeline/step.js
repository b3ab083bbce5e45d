// A traced step of all ranks, from live items, the history or a file. Times are seconds since the step began.

const groupKey = (axis, ranks, nth) => `${axis}|${nth}|${ranks.join()}`;

/** Return {step, began, seconds, groups: [{axis, ranks, nth}], ranks: rank -> {calls, spans}, leftOut}, sorted by time. */
function emptyStep(step) {
  return { step, began: Infinity, seconds: 0, groups: [], ranks: new Map(), leftOut: 0 };
}

function grouper(made) {
  const places = new Map();
  return (axis, ranks, nth) => {
    const key = groupKey(axis, ranks, nth);
    if (!places.has(key)) places.set(key, made.groups.push({ axis, ranks, nth }) - 1);
    return places.get(key);
  };
}

const lane = (made, rank) => {
  if (!made.ranks.has(rank)) made.ranks.set(rank, { calls: [], spans: [] });
  return made.ranks.get(rank);
};

/** Build a step from live items. `items` is rank -> {item, node}. `clocks` returns the correction of a node's clock. */
export function stepOfItems(step, items, clocks) {
  const made = emptyStep(step);
  const group = grouper(made);
  for (const [rank, { item, node }] of items) {
    const began = item.began + (clocks(node) ?? 0);
    const places = item.groups.map(({ axis, ranks, nth }) => group(axis, ranks, nth));
    const own = lane(made, rank);
    const { calls, spans } = item;
    for (let i = 0; i < calls.op.length; i += 1) {
      own.calls.push({
        group: places[calls.group[i]],
        op: calls.op[i],
        sequence: calls.sequence[i],
        from: began + calls.issued_us[i] / 1e6,
        to: began + calls.ended_us[i] / 1e6,
        blocked: calls.blocked_us[i] / 1e6,
        bytes: calls.payload_bytes[i],
        peer: calls.peer[i],
      });
    }
    for (let i = 0; i < spans.work.length; i += 1) {
      own.spans.push({
        work: spans.work[i],
        chunk: spans.chunk[i],
        micro: spans.micro_batch[i],
        from: began + spans.from_us[i] / 1e6,
        to: began + spans.to_us[i] / 1e6,
      });
    }
    made.leftOut += item.left_out;
  }
  return finished(made);
}

/** Build a step from columns of the history tables `calls` and `spans`. */
export function stepOfTables(step, calls, spans) {
  const made = emptyStep(step);
  const group = grouper(made);
  for (let i = 0; i < (calls.rank ?? []).length; i += 1) {
    lane(made, calls.rank[i]).calls.push({
      group: group(calls.axis[i], calls.ranks[i], calls.nth[i]),
      op: calls.op[i],
      sequence: calls.sequence[i],
      from: calls.issued[i],
      to: calls.ended[i],
      blocked: calls.blocked_s[i],
      bytes: calls.payload_bytes[i],
      peer: calls.peer[i],
    });
  }
  for (let i = 0; i < (spans.rank ?? []).length; i += 1) {
    const own = lane(made, spans.rank[i]);
    own.spans.push({ work: spans.work[i], chunk: spans.chunk[i], micro: spans.micro_batch[i], from: spans.began[i], to: spans.ended[i] });
  }
  return finished(made);
}

function finished(made) {
  let end = -Infinity;
  for (const { calls, spans } of made.ranks.values()) {
    for (const event of [...calls, ...spans]) {
      made.began = Math.min(made.began, event.from);
      end = Math.max(end, event.to ?? event.from);
    }
  }
  if (made.began === Infinity) made.began = end = 0;
  made.seconds = end - made.began;
  const earliest = (a, b) => a.from - b.from || (a.to ?? a.from) - (b.to ?? b.from);
  for (const [rank, own] of made.ranks) {
    for (const event of [...own.calls, ...own.spans]) {
      event.rank = rank;
      event.from -= made.began;
      event.open = event.to === null; // the end is missing
      event.to = event.open ? event.from : event.to - made.began;
    }
    own.calls.sort(earliest);
    own.spans.sort(earliest);
  }
  made.ranks = new Map([...made.ranks].sort(([a], [b]) => a - b));
  meet(made);
  return made;
}

const PAIRED = new Set(["send", "recv"]);

/**
 * Attribute waiting to the last rank. Each call gets `whole` (arrival of the last rank), `last` (the last rank) and `lead`.
 * They are null if a rank of the group is missing. Mirrors jobs.runs.traces.traced_steps (a test compares both).
 */
function meet(made) {
  const met = new Map();
  const numbers = new Map();
  const all = [...made.ranks.values()].flatMap((own) => own.calls);
  all.sort((a, b) => a.from - b.from || a.sequence - b.sequence);
  for (const call of all) {
    let key = `${call.group}#${call.sequence}`;
    if (PAIRED.has(call.op)) {
      const way = call.op === "send" ? `${call.rank}>${call.peer}` : `${call.peer}>${call.rank}`;
      const counter = `${call.group} ${way} ${call.op}`;
      numbers.set(counter, (numbers.get(counter) ?? 0) + 1);
      key = `${call.group}#${way}#${numbers.get(counter)}`;
    }
    if (!met.has(key)) met.set(key, []);
    met.get(key).push(call);
  }
  for (const together of met.values()) {
    const wanted = PAIRED.has(together[0].op) ? 2 : made.groups[together[0].group].ranks.length;
    const whole = new Set(together.map((call) => call.rank)).size >= wanted;
    let [first, last] = [together[0], together[0]];
    for (const call of together) {
      if (call.from > last.from) last = call;
      if (call.from < first.from) first = call;
    }
    for (const call of together) {
      call.lead = last.from - first.from; // from the first to the last rank
      call.whole = whole ? last.from : null;
      call.last = whole ? last.rank : null;
    }
  }
}

/** Return the ranks that share a group with a rank of the step, but sent no events. */
export function missingRanks(step) {
  const members = new Set(step.groups.flatMap((group) => group.ranks));
  return [...members].filter((rank) => !step.ranks.has(rank)).sort((a, b) => a - b);
}

/** Return the seconds that a call waited for the last rank, or null if unknown. */
export const waited = (call) => (call.whole === null ? null : Math.max(0, (call.open ? call.whole : Math.min(call.whole, call.to)) - call.from));

/** Return the seconds from the arrival of the last rank to the end. */
export const transferred = (call) => (call.open || call.whole === null ? null : Math.max(0, call.to - call.whole));
