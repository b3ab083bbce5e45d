// A form that starts something is sent once: its button rests until the answer comes. The server knows it again as well.
const FORMS = "form[data-once]";
const GIVES_UP_MS = 15_000; // nothing came: the person may have stopped it

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
  const form = event.target;
  if (!form.matches(FORMS) || event.defaultPrevented) return;
  if (form.dataset.sent !== undefined) return event.preventDefault();
  form.dataset.sent = "";
  const button = event.submitter ?? form.querySelector("button[type=submit]");
  if (button) setTimeout(() => rest(button)); // once it is sent: what is disabled sends no value of its own
  setTimeout(() => free(form), GIVES_UP_MS);
});

// Back from the job, the browser may show the page as it was left.
addEventListener("pageshow", ({ persisted }) => persisted && document.querySelectorAll(FORMS).forEach(free));
