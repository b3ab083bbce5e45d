// The Traffic calculator. The server computes all numbers. This module sends the slider values and shows the answer.
import { growthChart } from "../charts/growth.js";
import { copyText, el, embedded, withCode } from "../dom.js";
import { decimalBytes } from "../format.js";
import { failed } from "../refusal.js";

const DELAY_MS = 100;
const form = document.getElementById("sliders");
const draw = growthChart(document.getElementById("growth"));
const sliders = [...form.querySelectorAll(".slider")].map((row) => {
  const range = row.querySelector("input[type=range]");
  return { row, range, number: row.querySelector("input[type=text]"), least: Number(range.dataset.least), most: Number(range.dataset.most) };
});
let lastRequest = 0;

// Slider positions are logarithmic.
const toRange = ({ least, most }, value) => Math.round((200 * Math.log(value / least)) / Math.log(most / least));
const fromRange = ({ least, most, range }) => Math.round(least * (most / least) ** (Number(range.value) / 200));

function query() {
  const fields = new URLSearchParams(sliders.map(({ number }) => [number.name, number.value.trim()]));
  fields.set("over", form.elements.over.value);
  return fields;
}

function show({ lesson, curves }) {
  document.getElementById("order").textContent = lesson.order;
  const badge = document.getElementById("classic");
  badge.textContent = lesson.classic ? "usual order" : "unusual order";
  badge.dataset.tone = lesson.classic ? "good" : "warn";
  document.getElementById("verdict").textContent = lesson.verdict;
  const rows = lesson.volumes.map((v) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, v.name),
      el("td", { className: "number" }, decimalBytes(v.num_bytes)),
      el("td", {}, v.order),
      el("td", {}, el("code", {}, v.formula), el("br"), `= ${v.numbers}`),
      el("td", {}, v.source),
    ),
  );
  document.getElementById("volumes").replaceChildren(...rows);
  draw(curves, lesson.setting[curves.variable]);
}

function showProblems(problems) {
  for (const { row, number } of sliders) {
    const message = problems.find((p) => p.field === row.dataset.name)?.message ?? "";
    row.querySelector(".problem").replaceChildren(...withCode(message));
    number.toggleAttribute("aria-invalid", false);
    if (message) number.setAttribute("aria-invalid", "true");
  }
}

async function ask() {
  const mine = (lastRequest += 1);
  const fields = query();
  history.replaceState(null, "", `?${fields}`);
  try {
    const response = await fetch(`${form.dataset.url}?${fields}`);
    const answer = await response.json();
    if (mine !== lastRequest) return;
    showProblems(answer.errors ?? []);
    if (!answer.errors) show(answer);
  } catch (error) {
    document.getElementById("verdict").textContent = failed("Could not compute the numbers", error.message);
  }
}

let timer = null;
form.addEventListener("input", (event) => {
  const slider = sliders.find(({ row }) => row.contains(event.target));
  if (slider && event.target === slider.range) slider.number.value = String(fromRange(slider));
  else if (slider && /^\d+$/.test(slider.number.value)) slider.range.value = String(toRange(slider, Number(slider.number.value)));
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY_MS);
});
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("copy").addEventListener("click", async (event) => {
  const url = `${location.origin}${location.pathname}?${query()}`;
  event.target.textContent = (await copyText(url)) ? "Link copied" : "Copy from the address bar";
});
for (const slider of sliders) slider.range.value = String(toRange(slider, Number(slider.number.value)));
show({ lesson: embedded("lesson"), curves: embedded("curves") });
