// Shows each <time datetime> in the reader's time zone. The title on hover shows the age.
import { ago, dateTime, exactTime } from "../format.js";

function localise(root) {
  for (const node of root.querySelectorAll("time[datetime]:not([data-local])")) {
    const date = new Date(node.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    node.dataset.local = "true";
    node.textContent = ("exact" in node.dataset ? exactTime : dateTime)(date);
  }
}

localise(document);
document.addEventListener("htmx:afterSwap", (event) => localise(/** @type {Node} */ (event.target).parentElement ?? document));
document.addEventListener("mouseover", (event) => {
  const node = event.target instanceof Element && event.target.closest("time[datetime]");
  if (node) node.title = `${ago(new Date(node.dateTime))} · ${exactTime(new Date(node.dateTime))}`;
});
