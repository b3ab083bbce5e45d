// A primitive's page: figures with their units, and the copy button beside the call.
import { copyText } from "./dom.js";
import { byteRate, bytes, duration } from "./format.js";

for (const [name, format] of Object.entries({ bytes, seconds: duration, rate: byteRate })) {
  for (const place of document.querySelectorAll(`[data-${name}]`)) place.textContent = format(Number(place.dataset[name]));
}
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const copied = await copyText(document.getElementById(button.dataset.copies).textContent);
    button.textContent = copied ? "Copied" : "The clipboard is closed";
  });
}
