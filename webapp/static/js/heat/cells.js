// What the cells of ranks over time hold. Pure: no DOM.
/** Cells of ranks x bins within [from, to] unix seconds (null: all), newest bin left out while it fills. */
export function cellsOf(bins, ranks, accepts, { from = null, to = null, filling = false } = {}) {
  const times = bins.times();
  let last = times.length - (filling ? 1 : 0);
  let first = 0;
  while (from !== null && first < last && times[first] + bins.width <= from) first += 1;
  while (to !== null && last > first && times[last - 1] > to) last -= 1;
  const columns = Math.max(0, last - first);
  const cells = new Float32Array(ranks.length * columns);
  let most = 0;
  ranks.forEach((rank, row) => {
    const base = row * columns - first;
    for (const [key, values] of bins.rows.get(rank) ?? []) {
      if (!accepts(key)) continue;
      for (let i = first; i < Math.min(last, values.length); i += 1) if (values[i]) cells[base + i] += values[i] / bins.width;
    }
    for (const hole of bins.holes) {
      const i = hole - bins.start;
      if (i >= first && i < last) cells[base + i] = Number.NaN;
    }
  });
  for (const value of cells) if (value > most) most = value;
  return { cells, columns, most, times: times.slice(first, last) };
}
