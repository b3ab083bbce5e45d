// Smoothing of a noisy line. Pure.

/** Return the exponential moving average with `weight` in [0, 1), corrected for the bias at the start. Null stays null. */
export function smooth(values, weight) {
  if (!(weight > 0)) return values;
  let [sum, seen] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + (1 - weight) * value;
    seen += 1;
    return sum / (1 - weight ** seen);
  });
}
