// Bytes a second of each rank over time. Up to 16 ranks have lines of their own.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { byteRate, exactTime } from "../format.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";

const HEIGHT = 300;
export const MOST_LINES = 16;

export function trafficChart(container) {
  let chart = null;
  let shown = "";
  let data = [[]];
  let ranks = [];

  function build() {
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      padding: [null, 32, null, null], // the last time stands half beyond the last point
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [{ ...axis(`time of day (${zone()})`, clockTicks, 50), incrs: TIME_STEPS, space: 72 }, axis("payload bytes per second", rates, 84)],
      series: [
        { label: "time", value: (_, value) => (value === null ? "–" : exactTime(new Date(value * 1000))) },
        ...ranks.map((rank, index) => ({
          label: `rank ${rank}`,
          stroke: color(`--series-${index % MOST_LINES}`),
          width: 1.5,
          dash: index % 2 ? [6, 3] : undefined, // ranks of one group often send the same: both stay visible
          points: { show: false },
          value: (_, value) => (value === null ? "–" : byteRate(value)),
        })),
      ],
    };
    chart = new uPlot(options, data, container);
  }

  keepFitting(container, () => chart && build(), () => chart);
  return (bins, wanted, accepts, filling) => {
    ranks = wanted;
    data = [bins.times(), ...ranks.map((rank) => bins.rate(rank, accepts))];
    // A bin that is still filling would read as a drop.
    if (filling) for (const row of data) row.pop();
    if (data[0].length === 0) return;
    container.querySelector(".waiting")?.remove();
    if (!chart || shown !== ranks.join()) build();
    else chart.setData(data);
    shown = ranks.join();
  };
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600];
const ticksFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** The time of day; the first tick of each day has its date below. */
function clockTicks(_, ticks) {
  let day = "";
  return ticks.map((tick) => {
    const date = new Date(tick * 1000);
    const before = day;
    day = dayFormat.format(date);
    return day === before ? ticksFormat.format(date) : `${ticksFormat.format(date)}\n${day}`;
  });
}

function zone() {
  const parts = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(new Date());
  return parts.find((part) => part.type === "timeZoneName").value;
}

const rates = (_, ticks) => ticks.map((tick) => byteRate(tick));
