// Handles the pages of hosts: dialogs, the copy button, and the age of each heartbeat.
import { copyText } from "../dom.js";
import { agoBy } from "../format.js";

for (const button of document.querySelectorAll("[data-opens]")) {
  const open = () => document.getElementById(button.dataset.opens).showModal();
  button.addEventListener("click", open);
  if (button.dataset.now !== undefined || (button.id && location.hash === `#${button.id}`)) open();
}
for (const button of document.querySelectorAll("dialog [data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const copied = await copyText(document.getElementById(button.dataset.copies).textContent);
    button.textContent = copied ? "Copied" : "Copy failed";
  });
}

const begun = new WeakMap(); // element -> time on the page's clock, because the reader's clock may be wrong

function showAges() {
  for (const node of document.querySelectorAll("[data-age]")) {
    if (!begun.has(node)) begun.set(node, performance.now() - 1000 * Number(node.dataset.age));
    node.textContent = agoBy((performance.now() - begun.get(node)) / 1000);
  }
}
showAges();
setInterval(showAges, 1000);
document.addEventListener("htmx:afterSwap", showAges);
