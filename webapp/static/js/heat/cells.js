// Cells of the rank heatmap. Pure.

/** Return cells of ranks x bins within [from, to] unix seconds (null: no limit), without the last bin if `filling`. */
export function computeCells(bins, ranks, accepts, { from = null, to = null, filling = false } = {}) {
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

/** Merge cells into fewer rows and columns. A merged cell has the maximum of its cells, or NaN if no cell is known. */
export function fewer(cells, rows, columns, newRows, newColumns) {
  if (newRows >= rows && newColumns >= columns) return cells;
  const drawn = new Float32Array(newRows * newColumns).fill(Number.NaN);
  for (let row = 0; row < rows; row += 1) {
    const base = Math.floor((row * newRows) / rows) * newColumns;
    for (let column = 0; column < columns; column += 1) {
      const value = cells[row * columns + column];
      const at = base + Math.floor((column * newColumns) / columns);
      if (!(drawn[at] >= value) && !Number.isNaN(value)) drawn[at] = value;
    }
  }
  return drawn;
}
