// “Explain” opens a dialog with the formula, numbers and source of each term of a figure.
import { el } from "../dom.js";
import { bytes, count, decimalBytes, duration, exactBytes, integer } from "../format.js";
import { rowHead, scrolling, th } from "../pictures/table.js";
import { failed, fetchPatiently, words } from "../refusal.js";

function value(number, unit, figure) {
  if (unit === "B") return (figure === "traffic" ? decimalBytes : bytes)(number);
  if (unit === "s") return duration(number);
  if (unit === "") return `${(100 * number).toFixed(1)}%`;
  return `${unit === "parameters" ? integer(number) : count(number)} ${unit}`;
}

const exact = (number, unit) => (unit === "B" ? exactBytes(number) : undefined);

function line(term, figure) {
  const formula = el("td", {}, el("code", {}, term.formula), term.numbers ? el("br") : null, term.numbers ? `= ${term.numbers}` : null);
  const amount = el("td", { className: "number", title: exact(term.value, term.unit) }, value(term.value, term.unit, figure));
  return el("tr", {}, rowHead(null, term.name), amount, formula, el("td", { className: "source" }, term.source));
}

/** Each [data-explain] button inside `root` opens the dialog. `ask(figure)` resolves to {spec, cluster, stage}. */
export function explainButtons(root, dialog, url, ask) {
  root.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-explain]");
    if (!button) return;
    const title = dialog.querySelector("h2");
    const place = dialog.querySelector('[data-show="terms"]');
    title.textContent = button.dataset.explain;
    place.replaceChildren(el("p", { className: "note" }, "Loading…"));
    dialog.showModal();
    try {
      const answer = await fetchPatiently(url, {
        method: "POST",
        body: JSON.stringify(await ask(button.dataset.explain)),
        headers: { "Content-Type": "application/json", "X-CSRFToken": root.ownerDocument.querySelector("[name=csrfmiddlewaretoken]").value },
      });
      const made = await answer.json();
      if (made.errors) throw new Error(words(made.errors));
      const figure = made.find((f) => f.figure === button.dataset.explain);
      const whose = figure.stage === null ? "" : ` of a rank of stage ${figure.stage}`;
      title.textContent = `${figure.figure}${whose} = ${value(figure.value, figure.unit, figure.figure)}, ${figure.kind}`;
      const head = [th("term"), th("value", true), th("formula and numbers"), th("source")];
      place.replaceChildren(scrolling(head, figure.terms.map((term) => line(term, figure.figure))));
    } catch (error) {
      place.replaceChildren(el("p", { className: "problem" }, failed("No explanation", error.message)));
    }
  });
}
