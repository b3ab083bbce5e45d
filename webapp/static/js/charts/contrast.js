// Contrast of text on colored boxes, by the formula of WCAG 2. Pure.

/** Parse a CSS color, for example "rgb(1, 2, 3)", into [r, g, b]. */
export function channels(text) {
  const numbers = text.match(/[\d.]+/g).map(Number);
  return text.startsWith("color(") ? numbers.slice(0, 3).map((part) => Math.round(255 * part)) : numbers.slice(0, 3);
}

/** Return the color of `top` with an opacity over `below`. */
export const blend = (top, below, alpha) => top.map((value, i) => Math.round(below[i] + alpha * (value - below[i])));

function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => (value <= 10.31 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Return the contrast ratio of two colors, 1 to 21. */
export function contrast(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

const [BLACK, WHITE] = [[0, 0, 0], [255, 255, 255]];

/** Return black or white, the one with the higher contrast on `background`. The contrast is at least 4.5. */
export const textOn = (background) => (contrast(BLACK, background) > contrast(WHITE, background) ? "#000000" : "#ffffff");
