// The three main figures of an estimate, which stay visible above the charts.
import { byAxis } from "../collectives.js";
import { bytes, decimalBytes, duration, sureness, tokenRate } from "../format.js";
import { fitting } from "../pictures/memory.js";

const total = (stage) => Object.values(stage.step_bytes).reduce((sum, value) => sum + value, 0);
const most = (stages, of) => stages.reduce((first, other) => (of(other) > of(first) ? other : first));

/** The stages that the figures are for: the one with the most memory, and the one with the most traffic. */
export const findBusiestStages = ({ stages }) => ({ memory: most(stages, (stage) => stage.memory_bytes), traffic: most(stages, total) });

/**
 * Return the figures of an estimate by name.
 * @returns {Record<string, {text: string, tone?: string}>}
 * @param {Estimate} estimate
 */
export function headline(estimate) {
  const { time, cluster, peak_memory_bytes: peak, memory_interval: sure } = estimate;
  const { traffic: busiest } = findBusiestStages(estimate);
  const room = bytes(cluster.memory_bytes);
  const fits = estimate.fits ? fitting(estimate, room) : { text: `does not fit ${room}`, tone: "bad" };
  const axes = Object.entries(busiest.step_bytes).filter(([, value]) => value > 0);
  axes.sort(([one], [other]) => byAxis(one, other));
  return {
    memory: { text: bytes(peak) },
    fits: { ...fits, text: `${sureness(sure.share)}, ${fits.text}` },
    time: { text: duration(time.step_s) },
    speed: { text: `${sureness(time.interval.share)}, ${tokenRate(time.tokens_per_s)}` },
    traffic: { text: decimalBytes(total(busiest)) },
    axes: { text: axes.length ? axes.map(([axis, value]) => `${axis} ${decimalBytes(value)}`).join(" · ") : "no traffic" },
  };
}

export function showHeadline(list, estimate) {
  for (const [name, { text, tone }] of Object.entries(headline(estimate))) {
    const place = list.querySelector(`[data-head="${name}"]`);
    place.textContent = text;
    if (tone) place.dataset.tone = tone;
  }
}
