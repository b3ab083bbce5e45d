// The benchmark results on the job page: a table, a chart and CSV.
import { collectivesChart } from "../charts/collectives.js";
import { copyText, el } from "../dom.js";
import { byteRate, bytes, counted, duration, exactBytes, integer, opName } from "../format.js";

const COLUMNS = ["primitive", "num_bytes", "seconds", "algbw", "busbw", "wrong", "checked", "payload_bytes", "algorithmic_bytes"];
const SAID_MS = 2000;
const number = (text, extra = "", title = "") => el("td", { className: `number ${extra}`.trim(), title }, text);

/** Write a line per point. Columns have the names of the API, in bytes, seconds and bytes per second. */
export function csv(points) {
  return [COLUMNS.join(","), ...points.map((p) => COLUMNS.map((name) => p[name] ?? "").join(","))].join("\n");
}

function row(p) {
  const link = el("a", { href: `/collectives/${p.primitive.replaceAll("_", "-")}/` }, opName(p.primitive));
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, link),
    number(bytes(p.num_bytes), "", exactBytes(p.num_bytes)),
    number(duration(p.seconds)),
    number(byteRate(p.algbw)),
    number(byteRate(p.busbw)),
    number(integer(p.wrong), p.wrong > 0 ? "off" : "zero"),
    number(integer(p.checked)),
    number(bytes(p.payload_bytes), "", exactBytes(p.payload_bytes)),
    number(bytes(p.algorithmic_bytes), "", exactBytes(p.algorithmic_bytes)),
  );
}

/** Return a function that shows a result (LabResult in planner/facts/collectives.py). */
export function labView(section) {
  const find = (id) => section.querySelector(`#${id}`);
  const draw = collectivesChart(find("lab-chart"));
  const button = find("lab-csv");
  let shown = null;

  function drawChart() {
    const sized = shown.points.filter((p) => p.num_bytes > 0).map((p) => ({ ...p, op: p.primitive, payload_bytes: p.num_bytes }));
    find("lab-chart").hidden = sized.length === 0;
    if (sized.length > 0) draw(sized, section.querySelector("[name=lab-measure]:checked").value);
  }

  for (const radio of section.querySelectorAll("[name=lab-measure]")) radio.addEventListener("change", () => shown && drawChart());
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(csv(shown.points))) ? "Copied" : "Copy failed";
    setTimeout(() => (button.textContent = "Copy as CSV"), SAID_MS);
  });

  return (result) => {
    if (!result || result === shown) return;
    shown = result;
    const wrong = result.points.reduce((sum, p) => sum + p.wrong, 0);
    const badge = find("lab-wrong");
    badge.hidden = false;
    const right = result.points.some((p) => p.checked > 0) ? "All elements correct" : "Nothing to check";
    badge.dataset.tone = wrong > 0 ? "bad" : right === "Nothing to check" ? "" : "good";
    badge.textContent = wrong > 0 ? `${counted(wrong, "wrong element")}` : right;
    const group = result.ranks.length === result.world_size ? (result.world_size === 1 ? "1 rank" : `all ${result.world_size} ranks`) : `ranks ${result.ranks.join(", ")} of ${result.world_size}`;
    const how = `${result.dtype}, ${result.reduce_op}, root ${result.root}, median of ${integer(result.iterations)} calls`;
    delete find("lab-note").dataset.ended;
    find("lab-note").textContent = `${group} · ${how} · ${result.backend} on ${result.device_name} · torch ${result.torch_version}`;
    find("lab-rows").replaceChildren(...result.points.map(row));
    button.disabled = false;
    drawChart();
  };
}
