// Training curves over steps or time: loss, validation loss, gradient norm, learning rate, speed, step time, MFU.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { count, duration, loss, sampleRate, tokenRate } from "../format.js";
import { plot } from "./plot.js";
import { smooth } from "./smooth.js";

const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)}%`;
const small = (value) => (value === 0 ? "0" : Math.abs(value) >= 0.01 && Math.abs(value) < 1e4 ? value.toPrecision(3) : value.toExponential(1));

/** Curves by id of the container. `value` formats the legend, `ticks` the axis. */
export const CURVES = {
  "loss-chart": { name: "train", label: "nats per token", unit: "nats per token", value: loss, ticks: (value) => loss(value, 2), range: padded, height: 158 },
  "norm-chart": { name: "grad_norm", label: "gradient norm", value: small, ticks: small },
  "rate-chart": { name: "learning_rate", label: "learning rate", value: small, ticks: small, plain: true },
  "speed-chart": { name: "tokens_s", label: "tokens/s", value: tokenRate, ticks: count },
  "samples-chart": { name: "samples_s", label: "samples/s", value: sampleRate, ticks: count },
  "time-chart": { name: "step_s", label: "step time", value: duration, ticks: (value) => (value === 0 ? "0" : duration(value)) },
  "mfu-chart": { name: "mfu", label: "MFU", value: percent, ticks: percent },
};

/**
 * Return the columns of steps, sorted, with derived columns. `getMfu(step_s)` is null without a plan.
 * @param {Map<number, any>} steps
 * @param {(step_s: number) => number | null} getMfu
 */
export function curveColumns(steps, getMfu = () => null) {
  const rows = [...steps].sort((a, b) => a[0] - b[0]);
  const of = (value) => rows.map(([step, row]) => value(row, step));
  return {
    step: of((_, step) => step),
    time: of((row) => row.time),
    train: of((row) => row.loss),
    grad_norm: of((row) => row.grad_norm),
    learning_rate: of((row) => row.learning_rate),
    step_s: of((row) => row.step_s),
    tokens_s: of((row) => getRate(row.tokens, row.step_s)),
    samples_s: of((row) => getRate(row.samples, row.step_s)),
    mfu: of((row) => (row.step_s > 0 ? getMfu(row.step_s) : null)),
  };
}

const getRate = (amount, seconds) => (seconds > 0 && typeof amount === "number" ? amount / seconds : null);

/** Return a function from step time to MFU, scaled from the planned MFU. */
export function mfuFrom(estimate) {
  const time = estimate?.time;
  if (!(time?.mfu > 0) || !(time.step_s > 0)) return null;
  return (step_s) => (time.mfu * time.step_s) / step_s;
}

/** Whether the switch of the page asks for a time axis. Without a switch the axis is steps. */
const isOverTime = () => document.querySelector("[name=curve-axis]:checked")?.value === "time";

export function curveChart(container, page) {
  const { name, label, value, ticks, range, height = 158, plain, unit } = CURVES[container.id];
  const update = plot(container, page, { height, label, value, values: ticks, size: 68, range, unit, grows: name === "train" });
  let newest = null;
  for (const choice of document.querySelectorAll("[name=curve-axis]")) choice.addEventListener("change", () => newest && draw(...newest));

  function draw(curve, evals, weight) {
    newest = [curve, evals, weight];
    const steps = !isOverTime();
    const smoothed = weight > 0 && !plain;
    /** @type {{label: string, token: string, faint?: boolean, dots?: boolean}[]} */
    const lines = [{ label: smoothed ? "raw" : getCurveName(name), token: "--series-0", faint: smoothed }];
    const columns = [steps ? curve.step : curve.time, curve[name]];
    if (smoothed) {
      columns.push(smooth(curve[name], weight));
      lines.push({ label: "smoothed", token: "--series-0" });
    }
    if (name !== "train" || evals.size === 0) return update({ columns, lines, steps });
    lines.push({ label: "validation", token: "--series-1", dots: true });
    return update({ columns: withEvals(columns, evals, steps), lines, steps });
  }
  return draw;
}

const getCurveName = (name) => CURVE_NAMES[name] ?? name;
const CURVE_NAMES = { train: "train", grad_norm: "norm", learning_rate: "learning rate", tokens_s: "speed", samples_s: "speed", step_s: "step time", mfu: "MFU" };

function withEvals(columns, evals, steps) {
  const points = [...evals].map(([step, { time, loss: value }]) => [steps ? step : time, value]).sort((a, b) => a[0] - b[0]);
  const own = [points.map(([x]) => x), points.map(([, value]) => value)];
  return uPlot.join([columns, own]);
}

function padded(_, low, high) {
  if (low === null || high === null || low === undefined) return [0, 1];
  const margin = Math.max((high - low) * 0.08, 0.02);
  return [low - margin, high + margin];
}
