// Handles the queue: select rows, and move a row by drag or keys. Selection also works without this script.
import { failed, refused } from "../refusal.js";

const form = document.getElementById("bulk");
const holder = document.getElementById("queue");
const chosen = document.getElementById("chosen");
let dragged = null;
let busy = false;

const findRow = (job) => holder.querySelector(`tr[data-job="${job}"]`);
const boxes = () => [...holder.querySelectorAll("input[name=job]")];

function count() {
  if (!chosen) return;
  const number = boxes().filter((box) => box.checked).length;
  chosen.textContent = number ? `${number} selected` : "None selected";
}

async function move(job, where) {
  if (busy) return;
  busy = true;
  try {
    const answer = await fetch(form.dataset.moveUrl, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
      body: JSON.stringify({ job, ...where }),
    });
    if (!answer.ok) showMessage(failed("Not moved", await refused(answer)));
    else if ((await answer.json()).moved) refresh(job);
    else showMessage("Not moved. A job can move only among jobs with the same priority.");
  } catch (error) {
    showMessage(failed("Not moved", error.message));
  } finally {
    busy = false;
  }
}

function showMessage(words) {
  if (chosen) chosen.textContent = words;
}

/** Refresh the rows, then focus the handle of the job. */
function refresh(job) {
  count();
  holder.addEventListener("htmx:afterSettle", () => findRow(job)?.querySelector(".handle")?.focus(), { once: true });
  holder.dispatchEvent(new CustomEvent("refresh"));
}

// A refresh keeps the selected rows and the focus. During a drag the rows stay.
holder.addEventListener("refresh", (event) => dragged && event.stopImmediatePropagation(), { capture: true });
holder.addEventListener("htmx:beforeSwap", ({ detail }) => {
  if (dragged) {
    detail.shouldSwap = false;
    return;
  }
  const ticked = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
  const focused = holder.contains(document.activeElement) ? document.activeElement : null;
  const job = focused?.closest("tr[data-job]")?.dataset.job;
  const inRow = [".handle", "input[name=job]", ".job-name"].find((one) => focused?.matches(one));
  const settled = () => {
    for (const box of boxes()) box.checked = ticked.has(box.value);
    if (job && inRow) findRow(job)?.querySelector(inRow)?.focus({ preventScroll: true });
    if (boxes().filter((box) => box.checked).length < ticked.size) count(); // otherwise a message stays
    showStarts();
  };
  holder.addEventListener("htmx:afterSettle", settled, { once: true });
});

const SOON_S = 60; // the page shows minutes
const loaded = new WeakMap(); // element -> time on the page's clock, because the reader's clock may be wrong

/** Replace an estimated start that is less than a minute away, or in the past. */
function showStarts() {
  const now = performance.now();
  for (const node of holder.querySelectorAll("[data-in-s]")) {
    if (!loaded.has(node)) loaded.set(node, now);
    const left = Number(node.dataset.inS) - (now - loaded.get(node)) / 1000;
    if (left < SOON_S && node.textContent !== "any moment") node.textContent = "any moment";
  }
}
showStarts();
setInterval(showStarts, 1000);

holder.addEventListener("change", (event) => {
  if (event.target.id === "all") for (const box of boxes()) box.checked = event.target.checked;
  count();
});

const KEYS = { ArrowUp: "up", ArrowDown: "down", Home: "top" };
holder.addEventListener("keydown", (event) => {
  const row = event.target.closest(".handle") && event.target.closest("tr");
  if (!row || !(event.key in KEYS)) return;
  event.preventDefault();
  move(row.dataset.job, { to: KEYS[event.key] });
});

holder.addEventListener("dragstart", (event) => {
  dragged = event.target.closest("tr");
  if (!dragged) return;
  dragged.dataset.dragged = "";
  event.dataTransfer.effectAllowed = "move";
  event.dataTransfer.setData("text/plain", dragged.dataset.job);
});

function over(row) {
  for (const other of holder.querySelectorAll("[data-over]")) delete other.dataset.over;
  if (row && row !== dragged) row.dataset.over = "";
}

holder.addEventListener("dragover", (event) => {
  const row = event.target.closest("tbody tr");
  if (!dragged || !row || row.dataset.priority !== dragged.dataset.priority) return over(null);
  event.preventDefault();
  over(row);
});

holder.addEventListener("drop", (event) => {
  const row = event.target.closest("tbody tr");
  if (!dragged || !row || row === dragged) return;
  event.preventDefault();
  move(dragged.dataset.job, { before: row.dataset.job });
});

holder.addEventListener("dragend", () => {
  if (dragged) delete dragged.dataset.dragged;
  dragged = null;
  over(null);
});
