// The curves of training over steps: loss and validation, gradient norm, learning rate, tokens a second, MFU.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { count, duration, loss, tokenRate } from "../format.js";
import { plot } from "./plot.js";
import { smooth } from "./smooth.js";

const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
const small = (value) => (value === 0 ? "0" : Math.abs(value) >= 0.01 && Math.abs(value) < 1e4 ? value.toPrecision(3) : value.toExponential(1));

/** By id of its place. `values` is of the legend, `ticks` of the axis. */
export const CURVES = {
  "loss-chart": { name: "train", label: "nats per token", unit: "nats per token", value: loss, ticks: (value) => loss(value, 2), range: padded, height: 158 },
  "norm-chart": { name: "grad_norm", label: "gradient norm", value: small, ticks: small },
  "rate-chart": { name: "learning_rate", label: "learning rate", value: small, ticks: small, plain: true },
  "speed-chart": { name: "tokens_s", label: "tokens/s", value: tokenRate, ticks: count },
  "time-chart": { name: "step_s", label: "seconds a step", value: duration, ticks: duration },
  "mfu-chart": { name: "mfu", label: "MFU", value: percent, ticks: percent },
};

/** Steps as columns in their order, with what follows from them. `mfuOf(step_s)`: null where no plan tells it. */
export function curveColumns(steps, mfuOf = () => null) {
  const rows = [...steps].sort((a, b) => a[0] - b[0]);
  const of = (value) => rows.map(([step, row]) => value(row, step));
  return {
    step: of((_, step) => step),
    time: of((row) => row.time),
    train: of((row) => row.loss),
    grad_norm: of((row) => row.grad_norm),
    learning_rate: of((row) => row.learning_rate),
    step_s: of((row) => row.step_s),
    tokens_s: of((row) => (row.step_s > 0 ? row.tokens / row.step_s : null)),
    mfu: of((row) => (row.step_s > 0 ? mfuOf(row.step_s) : null)),
  };
}

/** The share of the ranks' peak that a step of so many seconds uses; the planner's own, carried over to this time. */
export function mfuFrom(estimate) {
  const time = estimate?.time;
  if (!(time?.mfu > 0) || !(time.step_s > 0)) return null;
  return (step_s) => (time.mfu * time.step_s) / step_s;
}

export function curveChart(container, page) {
  const { name, label, value, ticks, range, height = 158, plain, unit } = CURVES[container.id];
  const draw = plot(container, page, { height, label, value, values: ticks, size: 68, steps: true, range, unit });
  return (curve, evals, weight) => {
    const raw = curve[name];
    const smoothed = weight > 0 && !plain;
    const lines = [{ label: smoothed ? "as told" : nameOf(name), token: "--series-0", faint: smoothed }];
    const columns = [curve.time, raw];
    if (smoothed) {
      columns.push(smooth(raw, weight));
      lines.push({ label: nameOf(name), token: "--series-0" });
    }
    if (name !== "train" || evals.size === 0) return draw({ columns, lines });
    lines.push({ label: "validation", token: "--series-1", dots: true });
    return draw({ columns: withEvals(columns, evals), lines });
  };
}

const nameOf = (name) => CURVE_NAMES[name] ?? name;
const CURVE_NAMES = { train: "train", grad_norm: "norm", learning_rate: "learning rate", tokens_s: "speed", step_s: "time", mfu: "MFU" };

function withEvals(columns, evals) {
  const points = [...evals.values()].sort((a, b) => a.time - b.time);
  const own = [points.map((point) => point.time), points.map((point) => point.loss)];
  return uPlot.join([columns, own]);
}

function padded(_, low, high) {
  if (low === null || high === null || low === undefined) return [0, 1];
  const margin = Math.max((high - low) * 0.08, 0.02);
  return [low - margin, high + margin];
}
