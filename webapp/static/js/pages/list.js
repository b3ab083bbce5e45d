// Handles the list of jobs. Selected rows stay selected after a refresh. Keys move between rows.
import { addKeys } from "../shell/keys.js";

const form = document.getElementById("several");
const holder = document.getElementById("jobs");
const output = document.getElementById("chosen");
const chosen = new Set();
let here = null; // the job of the current row

const rows = () => [...holder.querySelectorAll("tr[data-job]")];
const getBox = (row) => row.querySelector("input[name=job]");

function show() {
  for (const row of rows()) {
    const box = getBox(row);
    box.checked = chosen.has(row.dataset.job);
    row.toggleAttribute("data-chosen", box.checked);
    row.toggleAttribute("data-here", row.dataset.job === here);
  }
  const all = document.getElementById("all");
  if (all) {
    all.hidden = false;
    all.checked = chosen.size > 0 && rows().every((row) => chosen.has(row.dataset.job));
  }
  if (!output) return;
  output.textContent = chosen.size ? `${chosen.size} selected` : "None selected";
  for (const button of form.querySelectorAll(".several button")) button.disabled = chosen.size === 0;
  const compare = form.querySelector("[value=compare]");
  compare.disabled = chosen.size < 2 || chosen.size > 6;
  compare.title = compare.disabled ? "Select 2 to 6 jobs" : "";
}

function choose(job, wanted = !chosen.has(job)) {
  if (wanted) chosen.add(job);
  else chosen.delete(job);
}

function go(step) {
  const all = rows();
  if (all.length === 0) return;
  const at = all.findIndex((row) => row.dataset.job === here);
  const next = all[Math.min(all.length - 1, Math.max(0, at === -1 ? 0 : at + step))];
  here = next.dataset.job;
  next.querySelector(".job-name").focus();
  next.scrollIntoView({ block: "nearest" });
  show();
}

holder.addEventListener("change", (event) => {
  if (event.target.id === "all") for (const row of rows()) choose(row.dataset.job, event.target.checked);
  if (event.target.name === "job") choose(event.target.value, event.target.checked);
  show();
});

holder.addEventListener("focusin", (event) => {
  here = event.target.closest("tr[data-job]")?.dataset.job ?? here;
});

// Restore the focus after a refresh of the table.
holder.addEventListener("htmx:beforeSwap", () => {
  const focused = holder.contains(document.activeElement) ? document.activeElement : null;
  const job = focused?.closest("tr[data-job]")?.dataset.job;
  if (!job) return;
  const inRow = focused.matches("input[name=job]") ? "input[name=job]" : ".job-name";
  holder.addEventListener(
    "htmx:afterSettle",
    () => rows().find((row) => row.dataset.job === job)?.querySelector(inRow)?.focus({ preventScroll: true }),
    { once: true },
  );
});

holder.addEventListener("htmx:afterSettle", () => {
  const there = new Set(rows().map((row) => row.dataset.job));
  for (const job of chosen) if (!there.has(job)) chosen.delete(job);
  show();
});

addKeys("Jobs", [
  { key: "j", words: "Next job", run: () => go(1) },
  { key: "k", words: "Previous job", run: () => go(-1) },
  {
    key: "x",
    words: "Select or clear this job",
    run: () => {
      if (!here) go(0);
      choose(here);
      show();
    },
  },
  { key: "/", words: "Search jobs", run: () => document.querySelector(".filters [name=q]")?.select() },
]);
// The browser restores checkboxes after a return to this page.
for (const row of rows()) if (getBox(row).checked) chosen.add(row.dataset.job);
show();
