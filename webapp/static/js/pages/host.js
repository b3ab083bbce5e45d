// Draws the results of the last calibration on the page of a host.
import { collectivesChart } from "../charts/collectives.js";
import { el, embedded } from "../dom.js";
import { bytes, duration, opName } from "../format.js";
import { cell, scrolling, th } from "../pictures/table.js";

for (const place of document.querySelectorAll("[data-seconds]")) place.textContent = duration(Number(place.dataset.seconds));

const profile = embedded("profile");
if (profile) {
  const most = Math.max(...profile.collectives.map((p) => p.ranks), 0);
  const busiest = profile.collectives.filter((p) => p.ranks === most && p.group_size === most);
  collectivesChart(document.getElementById("collectives-chart"))(busiest);
  const rows = profile.collectives.map((p) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, opName(p.op)),
      cell(String(p.group_size)),
      cell(String(p.ranks)),
      cell(bytes(p.payload_bytes)),
      cell(duration(p.seconds)),
    ),
  );
  const head = [th("collective"), th("group size", true), th("active ranks", true), th("payload", true), th("time", true)];
  const all = el("details", {}, el("summary", {}, "All measurements"), scrolling(head, rows));
  document.getElementById("collectives-table").append(all);
  const layers = profile.layers.map((p) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, `${p.arch}, hidden ${p.hidden_size}`),
      cell(p.sequence_parallel ? `${p.tp}, sequence parallel` : String(p.tp)),
      cell(String(p.micro_batch)),
      cell(String(p.ranks)),
      cell(duration(p.forward_s)),
      cell(duration(p.backward_s)),
    ),
  );
  const layerHead = [th("layer"), th("tp", true), th("micro-batch", true), th("active ranks", true), th("forward", true), th("backward", true)];
  document.getElementById("layers-table").append(el("details", {}, el("summary", {}, `${layers.length} measurements`), scrolling(layerHead, layers)));
}
