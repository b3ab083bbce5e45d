// How a value becomes a colour: one hue from the surface to the axis' colour, so that darker (in the dark, lighter) is
// always more, whoever looks. Pure.

export const SHADES = 256;
const FAINTEST = 0.12; // of the way: the least that is not nothing is seen

/** "rgb(1, 2, 3)" and its kin as [r, g, b]. */
export function channels(text) {
  const numbers = text.match(/[\d.]+/g).map(Number);
  return text.startsWith("color(") ? numbers.slice(0, 3).map((part) => Math.round(255 * part)) : numbers.slice(0, 3);
}

/** Packed pixels from `low` to `high`: shade 0 is nothing at all. */
export function shades(low, high) {
  const pixels = new Uint32Array(SHADES);
  for (let shade = 0; shade < SHADES; shade += 1) {
    const way = shade === 0 ? 0 : FAINTEST + ((1 - FAINTEST) * shade) / (SHADES - 1);
    const [r, g, b] = low.map((from, i) => Math.round(from + way * (high[i] - from)));
    pixels[shade] = (255 << 24) | (b << 16) | (g << 8) | r; // little endian: RGBA in memory
  }
  return pixels;
}

/** The shade of a value of `most`; the square root keeps small ones apart. NaN: none. */
export const shadeOf = (value, most) => (value > 0 && most > 0 ? Math.max(1, Math.round((SHADES - 1) * Math.sqrt(Math.min(1, value / most)))) : 0);

/** The value in the middle of the scale as drawn, for the legend. */
export const atShare = (share, most) => share * share * most;
