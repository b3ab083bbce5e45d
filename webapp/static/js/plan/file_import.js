// The imports of a Hugging Face config.json and of another tool's layout, in the Planner and in the job form.
import { el, withCode } from "../dom.js";
import { integer, parameters } from "../format.js";
import { failed, fetchPatiently, refused, words } from "../refusal.js";

/**
 * Set up the import of a model. `use(found)` receives the model, the values of its fields, and its parameters.
 * @param {any} form
 * @param {(found: any) => void} use
 */
export function setUpConfigImport(form, use) {
  const panel = /** @type {HTMLElement} */ (form.querySelector(".config-import"));
  setUp(form, panel, "model", (text) => text, (found) => {
    use(found);
    const notes = [...found.notes, ...found.not_runnable.map((one) => one.message)];
    return [`Imported: ${integer(found.parameters)} parameters (${parameters(found.parameters)}).`, notes];
  });
}

/**
 * Set up the import of a layout. `use(found)` receives the sections of the spec, and the values of the model fields.
 * @param {any} form
 * @param {(found: any) => void} use
 */
export function setUpLayoutImport(form, use) {
  const panel = /** @type {HTMLElement} */ (form.querySelector(".layout-import"));
  const ranks = /** @type {any} */ (panel.querySelector("input[type=text]"));
  ranks.addEventListener("input", (event) => event.stopPropagation());
  const body = (text) => JSON.stringify({ text, ranks: whole(ranks.value) });
  setUp(form, panel, "layout", body, (found) => {
    use(found);
    return [`Imported: layout of ${found.tool} for ${integer(found.ranks)} ranks.`, describeLayout(found)];
  });
}

/** Return null without a number, and the text itself if it is no number, which the server reports. */
export function whole(text) {
  const trimmed = text.trim();
  return trimmed === "" ? null : /^\d{1,9}$/.test(trimmed) ? Number(trimmed) : trimmed;
}

/** List the notes, the assumed settings, and the settings that were not understood. */
export function describeLayout({ notes, assumed, not_understood: unread }) {
  const names = unread.map((name) => `\`${name}\``).join(", ");
  return [...notes, ...assumed, ...(unread.length ? [`Not understood: ${names}.`] : [])];
}

function setUp(form, panel, what, makeBody, show) {
  const text = panel.querySelector("textarea");
  const file = /** @type {any} */ (panel.querySelector("input[type=file]"));
  const [problem, output] = [panel.querySelector(".problem"), panel.querySelector("[role=status]")];
  const button = panel.querySelector("button");

  async function send() {
    button.disabled = true;
    problem.replaceChildren();
    output.replaceChildren();
    try {
      const headers = { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
      const answer = await fetchPatiently(panel.dataset.url, { method: "POST", body: makeBody(text.value), headers });
      if (answer.redirected || answer.status === 403) throw new Error("you are logged out. Open the page again");
      if (!answer.ok) throw new Error(await refused(answer));
      const found = await answer.json();
      if (found.errors) return problem.replaceChildren(...withCode(words(found.errors)));
      const [title, notes] = show(found);
      output.replaceChildren(
        el("p", {}, title),
        el("ul", {}, ...notes.map((note) => el("li", {}, ...withCode(note)))),
      );
    } catch (error) {
      problem.textContent = failed(`No ${what} was imported`, error.message);
    } finally {
      button.disabled = false;
    }
  }

  // Changes of these controls are no changes of the form.
  for (const control of [text, file]) control.addEventListener("input", (event) => event.stopPropagation());
  file.addEventListener("change", async () => {
    if (!file.files[0]) return;
    text.value = await file.files[0].text();
    send();
  });
  button.addEventListener("click", send);
}
