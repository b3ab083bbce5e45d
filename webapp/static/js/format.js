// Numbers and times as people read them, always with a unit.
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  const sign = value < 0 ? "−" : "";
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1024 && unit < BINARY.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : size < 10 ? 2 : size < 100 ? 1 : 0;
  return `${sign}${size.toFixed(digits)} ${BINARY[unit]}`;
}

export const exactBytes = (value) => `${value < 0 ? "−" : ""}${count(Math.abs(value))} B`;

export const rate = (value) => `${bytes(value)}/s`;

export const count = (value) => Math.round(value).toLocaleString("en-GB").replaceAll(",", "\u202f");

export function parameters(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return count(value);
}

export function seconds(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 1)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const clock = new Intl.DateTimeFormat("en-GB", {
  year: "numeric", month: "short", day: "numeric",
  hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
});

export const time = (when) => clock.format(new Date(when));

export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;
