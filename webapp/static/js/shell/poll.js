// Asks htmx to refresh the elements marked data-poll (seconds), only while the page is visible. One that cannot be refreshed
// says since when, and once the session has ended the page asks who one is.
import { el } from "../dom.js";

const FAILURES = ["htmx:responseError", "htmx:sendError", "htmx:timeout"];
const pathOf = (address) => new URL(address, location.href).pathname;

for (const node of document.querySelectorAll("[data-poll]")) {
  let fresh = new Date();
  const note = el("p", { className: "message", role: "status" });
  note.dataset.tone = "warn";

  const refresh = () => {
    if (document.visibilityState === "visible") node.dispatchEvent(new CustomEvent("refresh"));
  };
  setInterval(refresh, 1000 * Number(node.dataset.poll));
  document.addEventListener("visibilitychange", refresh);

  /** Of this panel's own requests: forms in it may send others. */
  const on = (name, then) => node.addEventListener(name, (event) => event.detail.requestConfig?.elt === node && then(event));
  for (const failure of FAILURES) {
    on(failure, () => {
      const words = `Not refreshed since ${fresh.toISOString().slice(11, 19)} UTC`;
      if (note.textContent !== words) note.textContent = words;
      if (!note.isConnected) node.before(note);
    });
  }
  on("htmx:beforeSwap", ({ detail }) => {
    if (pathOf(detail.xhr.responseURL) === pathOf(detail.requestConfig.path)) return;
    detail.shouldSwap = false; // another page, as that of a login
    location.reload();
  });
  on("htmx:afterSwap", () => {
    fresh = new Date();
    note.remove();
  });
}
