// The queue: choosing rows, and moving one by drag or by keys. Without script, rows can be chosen all the same.
const form = document.getElementById("bulk");
const holder = document.getElementById("queue");
const chosen = document.getElementById("chosen");
let dragged = null;
let busy = false;

const boxes = () => [...holder.querySelectorAll("input[name=job]")];

function count() {
  if (!chosen) return;
  const number = boxes().filter((box) => box.checked).length;
  chosen.textContent = number ? `${number} chosen` : "None chosen";
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
    const told = answer.ok ? await answer.json() : { moved: false };
    if (!told.moved && chosen) chosen.textContent = "It stays where it is: jobs move among those of their priority.";
    if (told.moved) refresh(job);
  } finally {
    busy = false;
  }
}

function refresh(job) {
  holder.addEventListener("htmx:afterSettle", () => holder.querySelector(`tr[data-job="${job}"] .handle`)?.focus(), { once: true });
  holder.dispatchEvent(new CustomEvent("refresh"));
}

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
