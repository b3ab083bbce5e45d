// Server times are UTC; show them in the reader's zone, also in rows that htmx brings.
import { time } from "./format.js";

function localise() {
  for (const node of document.querySelectorAll("time[datetime]")) node.textContent = time(node.dateTime);
}

localise();
document.addEventListener("htmx:afterSettle", localise);
