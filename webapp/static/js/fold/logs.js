// Folds log lines, of each rank and of each member's launcher. Pure.

export const LOG_LINES = 2000; // kept per rank in the page; the host keeps the files

/** Each member has a launcher: -1 is that of node 0, -2 that of node 1. */
export const logKey = (rank, node) => (rank < 0 ? -1 - node : rank);

export function foldLog(state, item, node) {
  const key = logKey(item.rank, node);
  if (!state.logs.has(key)) state.logs.set(key, { node, lines: [], next: 0, total: 0 });
  const log = state.logs.get(key);
  const skipped = Math.max(item.first - log.next, item.skipped ?? 0);
  if (skipped > 0) log.lines.push({ skipped });
  const seen = Math.max(0, log.next - item.first);
  for (const text of item.lines.slice(seen)) log.lines.push({ text });
  log.next = Math.max(log.next, item.first + item.lines.length);
  log.total = log.next;
  if (log.lines.length > LOG_LINES) log.lines.splice(0, log.lines.length - LOG_LINES);
}
