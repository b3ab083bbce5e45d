// Refreshes elements with data-poll (seconds) while the page is visible. A note shows the time of the last refresh
// after a failure. The page reloads to the login when the session has ended.
import { el } from "../dom.js";

const FAILURES = ["htmx:responseError", "htmx:sendError", "htmx:timeout"];
const getPath = (address) => new URL(address, location.href).pathname;

for (const node of document.querySelectorAll("[data-poll]")) {
  let fresh = new Date();
  const note = el("p", { className: "message", role: "status" });
  note.dataset.tone = "warn";

  const refresh = () => {
    if (document.visibilityState === "visible") node.dispatchEvent(new CustomEvent("refresh"));
  };
  setInterval(refresh, 1000 * Number(node.dataset.poll));
  document.addEventListener("visibilitychange", refresh);

  /** Handles only the requests of this panel, because forms inside it may send others. */
  const on = (name, then) => node.addEventListener(name, (event) => event.detail.requestConfig?.elt === node && then(event));
  for (const failure of FAILURES) {
    on(failure, () => {
      const words = `No update since ${fresh.toISOString().slice(11, 19)} UTC. Retrying.`;
      if (note.textContent !== words) note.textContent = words;
      if (!note.isConnected) node.before(note);
    });
  }
  on("htmx:beforeSwap", ({ detail }) => {
    if (getPath(detail.xhr.responseURL) === getPath(detail.requestConfig.path)) return;
    detail.shouldSwap = false; // a redirect, such as to the login
    location.reload();
  });
  on("htmx:afterSwap", () => {
    fresh = new Date();
    note.remove();
  });
}
