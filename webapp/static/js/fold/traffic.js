// Folds counters (contracts/telemetry/steps.py): what each rank sent, when, and what is missing of it. Pure.

const SCRIPT_SETUP_STEPS = 2; // of a script, the first (contracts/telemetry/words.py)

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

/** The keys of `Bins`: enough to filter by axis and by collective. */
export const binKey = (cell) => `${cell.axis}/${cell.op}`;
export const cellKey = (cell) => `${cell.phase}/${cell.axis}/${cell.op}/${cell.group_size}`;

export function foldCells(state, item, node) {
  const rank = rankState(state, item.rank, node);
  for (const cell of item.cells) {
    const key = cellKey(cell);
    const before = rank.cells.get(key);
    // Step items and traffic items leave the rank by two doors: an older snapshot may arrive second.
    if (before && (cell.count < before.count || cell.completed < before.completed)) continue;
    rank.cells.set(key, cell);
    // After a break the first value says what happened before it, too: no honest rate follows from it.
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
  state.processes.delete(item.rank); // it speaks for itself again
  foldCells(state, item, node);
}

export function foldPhase(state, item, node) {
  const rank = rankState(state, item.rank, node);
  rank.phase = item.phase;
  if (item.cells !== undefined) {
    rank.exactStep = Math.max(0, item.steps - SCRIPT_SETUP_STEPS); // its phase "step" begins behind them
    rank.exactCells = item.cells;
  }
  // Of a script, which has no step items.
  if (item.rank === 0 && item.steps !== undefined) state.progress = { step: item.steps, steps: null, rate: null };
}

/** History of a member is missing up to `to`: mark it, and take the next value of its counters as new baselines. */
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
