// Sends a form once: disables its button until the answer arrives. The server also rejects duplicates.
const FORMS = "form[data-once]";
const GIVES_UP_MS = 15_000; // the user may have stopped the request

function free(form) {
  delete form.dataset.sent;
  for (const button of form.querySelectorAll("button[data-rests]")) {
    button.disabled = false;
    delete button.dataset.rests;
  }
}

function rest(button) {
  button.disabled = true;
  button.dataset.rests = "";
}

document.addEventListener("submit", (event) => {
  const form = /** @type {HTMLFormElement} */ (event.target);
  if (!form.matches(FORMS) || event.defaultPrevented) return;
  if (form.dataset.sent !== undefined) return event.preventDefault();
  form.dataset.sent = "";
  const button = event.submitter ?? form.querySelector("button[type=submit]");
  if (button) setTimeout(() => rest(button)); // after the submit, because a disabled button sends no value
  setTimeout(() => free(form), GIVES_UP_MS);
});

// The browser may restore the page after a return to it.
addEventListener("pageshow", ({ persisted }) => persisted && document.querySelectorAll(FORMS).forEach(free));
