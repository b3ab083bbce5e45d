// Lengths of intervals that may overlap. Intervals are [from, to].

/** Return the union as sorted, disjoint intervals. */
export function union(intervals) {
  const sorted = intervals.filter(([from, to]) => to > from).sort((a, b) => a[0] - b[0]);
  const joined = [];
  for (const [from, to] of sorted) {
    const last = joined[joined.length - 1];
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else joined.push([from, to]);
  }
  return joined;
}

export const length = (joined) => joined.reduce((sum, [from, to]) => sum + to - from, 0);

/** Return the length of the intersection of two unions. */
export function shared(one, other) {
  let [i, j, sum] = [0, 0, 0];
  while (i < one.length && j < other.length) {
    const from = Math.max(one[i][0], other[j][0]);
    const to = Math.min(one[i][1], other[j][1]);
    if (to > from) sum += to - from;
    if (one[i][1] < other[j][1]) i += 1;
    else j += 1;
  }
  return sum;
}
