// Shows every <time datetime> in the reader's own zone, named; the server wrote UTC.
import { clock, dateTime } from "./format.js";

function localise(root) {
  for (const node of root.querySelectorAll("time[datetime]:not([data-local])")) {
    const date = new Date(node.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    node.dataset.local = "true";
    node.textContent = clock(date);
    node.title = dateTime(date);
  }
}

localise(document);
document.addEventListener("htmx:afterSwap", (event) => localise(event.target.parentElement ?? document));
