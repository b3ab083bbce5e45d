// What happened in a run, over every chart at its time: checkpoint, validation, resume, fault.

export const KINDS = {
  checkpoint: { letter: "C", token: "--good" },
  validation: { letter: "V", token: "--series-1" },
  resume: { letter: "R", token: "--accent" },
  gap: { letter: "G", token: "--warn" },
  fault: { letter: "!", token: "--bad" },
};
const MOST_LINES = 48;
const LETTER_PX = 10;

/** The marks that a window shows; of very many, validations are left out first. */
export function marksIn(marks, from, to) {
  const inside = marks.filter((mark) => KINDS[mark.kind] && mark.time >= from && mark.time <= to);
  return inside.length <= MOST_LINES ? inside : inside.filter((mark) => mark.kind !== "validation");
}

/** "checkpoint after step 100" */
export function markWords(mark) {
  const when = mark.step === null || mark.step === undefined ? "" : mark.kind === "fault" ? ` at step ${mark.step}` : ` after step ${mark.step}`;
  return `${mark.kind}${when}${mark.text ? `: ${mark.text}` : ""}`;
}

/** Draws on a uPlot chart, with `colors` by kind. */
export function drawMarks(chart, marks, colors) {
  const { ctx, bbox } = chart;
  const { min, max } = chart.scales.x;
  if (min === null || min === undefined) return;
  const shown = marksIn(marks, min, max);
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.textAlign = "center";
  let free = -Infinity; // from where on a letter stands over no other
  ctx.font = `600 ${10 * ratio}px system-ui, sans-serif`;
  for (const mark of shown) {
    const x = Math.round(chart.valToPos(mark.time, "x", true));
    ctx.strokeStyle = colors[mark.kind];
    ctx.fillStyle = colors[mark.kind];
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (x < free) continue;
    ctx.fillText(KINDS[mark.kind].letter, x, bbox.top - 2 * ratio);
    free = x + LETTER_PX * ratio;
  }
  ctx.restore();
}
