// The page of a collective: values with units, the copy button and the stages.
import { copyText, embedded } from "../dom.js";
import { byteRate, bytes, duration } from "../format.js";
import { playFilm } from "./film.js";

for (const [name, format] of Object.entries({ bytes, seconds: duration, rate: byteRate })) {
  for (const place of document.querySelectorAll(`[data-${name}]`)) place.textContent = format(Number(place.dataset[name]));
}
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const copied = await copyText(document.getElementById(button.dataset.copies).textContent);
    button.textContent = copied ? "Copied" : "Copy failed";
  });
}
const film = embedded("film-data");
if (film) playFilm(document.getElementById("film"), film);
