// Folds traffic counters (contracts/telemetry/items.py) by rank and time, with gaps. Pure.

const SCRIPT_SETUP_STEPS = 2; // first steps of a script (contracts/telemetry/items.py)

export function memberState(state, node) {
  if (!state.members.has(node)) state.members.set(node, { lastId: null, time: null, host: null, clock: null, lost: false });
  return state.members.get(node);
}

export function rankState(state, rank, node = 0) {
  if (!state.ranks.has(rank)) {
    const fresh = { node, phase: null, time: null, cells: new Map(), exactStep: 0, exactCells: [], dropped: 0 };
    state.ranks.set(rank, { ...fresh, baseline: state.members.get(node)?.lost ?? false });
  }
  return state.ranks.get(rank);
}

/** Keys of `Bins`, which filter by axis and collective. */
export const binKey = (cell) => `${cell.axis}/${cell.op}`;
export const cellKey = (cell) => `${cell.phase}/${cell.axis}/${cell.op}/${cell.group_size}`;

export function foldCells(state, item, node) {
  const rank = rankState(state, item.rank, node);
  for (const cell of item.cells) {
    const key = cellKey(cell);
    const before = rank.cells.get(key);
    // Step items and traffic items use two channels, so an older snapshot may arrive later.
    if (before && (cell.count < before.count || cell.completed < before.completed)) continue;
    rank.cells.set(key, cell);
    // The first value after a gap includes the traffic of the gap, so it gives no rate.
    const known = before && !rank.stale?.has(key);
    rank.stale?.delete(key);
    if (!known && rank.baseline) continue;
    const amount = cell.payload_bytes - (known ? before.payload_bytes : 0);
    if (amount <= 0) continue;
    state.recent.add(item.rank, binKey(cell), item.time, amount);
    state.whole.add(item.rank, binKey(cell), item.time, amount);
  }
}

export function foldTraffic(state, item, node) {
  rankState(state, item.rank, node).dropped = item.dropped;
  state.processes.delete(item.rank); // the rank reports again
  foldCells(state, item, node);
}

export function foldPhase(state, item, node) {
  const rank = rankState(state, item.rank, node);
  rank.phase = item.phase;
  if (item.cells !== undefined) {
    rank.exactStep = Math.max(0, item.steps - SCRIPT_SETUP_STEPS); // phase "step" begins after the set-up steps
    rank.exactCells = item.cells;
  }
  // A script reports its last steps this way if they have no time.
  if (item.rank === 0 && item.steps !== undefined) {
    const before = state.progress ?? { steps: null, rate: null, step: 0 };
    state.progress = { ...before, step: Math.max(before.step, item.steps) };
  }
}

/** Mark a gap in the history of a member. The next values of its counters are new baselines. */
export function markGap(state, from, to, node = 0) {
  state.gaps += 1;
  state.lost = true;
  memberState(state, node).lost = true;
  for (const rank of state.ranks.values()) {
    if (rank.node !== node) continue;
    rank.baseline = true;
    rank.stale = new Set(rank.cells.keys());
  }
  if (from === null || to === null || to < from) return;
  state.recent.hole(Math.max(from, to - 60), to);
  state.whole.hole(from, to);
}
