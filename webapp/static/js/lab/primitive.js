// A primitive's page: figures with their units, the copy button beside the call, and the film.
import { copyText, embedded } from "../dom.js";
import { byteRate, bytes, duration } from "../format.js";
import { playFilm } from "./film.js";

for (const [name, format] of Object.entries({ bytes, seconds: duration, rate: byteRate })) {
  for (const place of document.querySelectorAll(`[data-${name}]`)) place.textContent = format(Number(place.dataset[name]));
}
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const copied = await copyText(document.getElementById(button.dataset.copies).textContent);
    button.textContent = copied ? "Copied" : "The clipboard is closed";
  });
}
const film = embedded("film-data");
if (film) playFilm(document.getElementById("film"), film);
