// Events of a run as marks on every chart: checkpoint, validation, resume, fault, gap.

export const KINDS = {
  checkpoint: { letter: "C", token: "--good" },
  validation: { letter: "V", token: "--series-1" },
  resume: { letter: "R", token: "--accent" },
  gap: { letter: "G", token: "--warn" },
  fault: { letter: "!", token: "--bad" },
};
const MOST_LINES = 48;
const LETTER_PX = 13; // the side of the square around a letter

/** Return the marks within a range, without validations if there are too many marks. */
export function marksIn(marks, from, to) {
  const inside = marks.filter((mark) => KINDS[mark.kind] && mark.time >= from && mark.time <= to);
  return inside.length <= MOST_LINES ? inside : inside.filter((mark) => mark.kind !== "validation");
}

/** "checkpoint after step 100" */
export function markWords(mark) {
  const when = mark.step === null || mark.step === undefined ? "" : mark.kind === "fault" ? ` at step ${mark.step}` : ` after step ${mark.step}`;
  return `${mark.kind}${when}${mark.text ? `: ${mark.text}` : ""}`;
}

/**
 * Place the letters of marks [{kind, x}] without overlap. Close letters are side by side, each kind once. `gap` is the
 * distance between letters, and `last` is the last allowed place.
 */
export function letterPlaces(marks, gap, last) {
  const places = [];
  let near = new Set(); // kinds of the current group of letters
  for (const { kind, x } of [...marks].sort((a, b) => a.x - b.x)) {
    const free = (places.at(-1)?.x ?? -Infinity) + gap;
    if (x >= free) near = new Set();
    else if (near.has(kind)) continue;
    near.add(kind);
    places.push({ kind, x: Math.max(x, free) });
  }
  for (let i = places.length - 1, end = last; i >= 0 && places[i].x > end; i -= 1, end -= gap) places[i].x = end;
  return places;
}

/** Draw marks on a uPlot chart. `colors` are the colors of the squares by kind, and the color `letter`. */
export function drawMarks(chart, marks, colors) {
  const { ctx, bbox } = chart;
  const { min, max } = chart.scales.x;
  if (min === null || min === undefined) return;
  const shown = marksIn(marks, min, max);
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.font = `600 ${10 * ratio}px system-ui, sans-serif`;
  const places = shown.map(({ kind, time }) => ({ kind, x: Math.round(chart.valToPos(time, "x", true)) }));
  for (const [x, kind] of new Map(places.map((place) => [place.x, place.kind]))) {
    ctx.strokeStyle = colors[kind];
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  const gap = LETTER_PX * ratio;
  for (const { kind, x } of letterPlaces(places, gap, ctx.canvas.width - gap / 2)) {
    const middle = bbox.top - (gap + ratio) / 2;
    ctx.fillStyle = colors[kind];
    ctx.fillRect(x - gap / 2, middle - gap / 2, gap, gap);
    ctx.fillStyle = colors.letter;
    ctx.fillText(KINDS[kind].letter, x, middle);
  }
  ctx.restore();
}
