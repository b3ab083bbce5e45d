// The color scale of heat maps: one hue, from the color of the surface to the color of the axis. Pure.

export const SHADES = 256;
const FAINTEST = 0.12; // share of the scale at which the smallest value above 0 starts, to stay visible

/** Return packed pixels from `low` to `high`. Shade 0 is the value 0. */
export function shades(low, high) {
  const pixels = new Uint32Array(SHADES);
  for (let shade = 0; shade < SHADES; shade += 1) {
    const way = shade === 0 ? 0 : FAINTEST + ((1 - FAINTEST) * shade) / (SHADES - 1);
    const [r, g, b] = low.map((from, i) => Math.round(from + way * (high[i] - from)));
    pixels[shade] = (255 << 24) | (b << 16) | (g << 8) | r; // little endian: RGBA in memory
  }
  return pixels;
}

/** Return the shade of a value between 0 and `most`. The square root makes small values distinguishable. */
export const computeShade = (value, most) => (value > 0 && most > 0 ? Math.max(1, Math.round((SHADES - 1) * Math.sqrt(Math.min(1, value / most)))) : 0);

/** Return the value at a share of the scale, for the legend. */
export const atShare = (share, most) => share * share * most;
