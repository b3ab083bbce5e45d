// The import of a model from a Hugging Face config.json, in the Planner and in the job form.
import { el, withCode } from "../dom.js";
import { integer, parameters } from "../format.js";
import { failed, fetchPatiently, refused, words } from "../refusal.js";

/**
 * Set up the panel. `use(found)` receives the model, the values of its fields, and its parameters.
 * @param {any} form
 * @param {(found: any) => void} use
 */
export function setUpConfigImport(form, use) {
  const panel = /** @type {HTMLElement} */ (form.querySelector(".config-import"));
  const text = panel.querySelector("textarea");
  const file = /** @type {any} */ (panel.querySelector("input[type=file]"));
  const [problem, output] = [panel.querySelector(".problem"), panel.querySelector("[role=status]")];
  const button = panel.querySelector("button");

  async function importModel() {
    button.disabled = true;
    problem.replaceChildren();
    output.replaceChildren();
    try {
      const headers = { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
      const answer = await fetchPatiently(panel.dataset.url, { method: "POST", body: text.value, headers });
      if (answer.redirected || answer.status === 403) throw new Error("you are logged out. Open the page again");
      if (!answer.ok) throw new Error(await refused(answer));
      const found = await answer.json();
      if (found.errors) return problem.replaceChildren(...withCode(words(found.errors)));
      use(found);
      const notes = [...found.notes, ...found.not_runnable.map((one) => one.message)];
      output.replaceChildren(
        el("p", {}, `Imported: ${integer(found.parameters)} parameters (${parameters(found.parameters)}).`),
        el("ul", {}, ...notes.map((note) => el("li", {}, ...withCode(note)))),
      );
    } catch (error) {
      problem.textContent = failed("No model was imported", error.message);
    } finally {
      button.disabled = false;
    }
  }

  // Changes of these controls are no changes of the form.
  for (const control of [text, file]) control.addEventListener("input", (event) => event.stopPropagation());
  file.addEventListener("change", async () => {
    if (!file.files[0]) return;
    text.value = await file.files[0].text();
    importModel();
  });
  button.addEventListener("click", importModel);
}
