// Asks htmx to refresh the elements marked data-poll (seconds), only while the page is visible.
for (const node of document.querySelectorAll("[data-poll]")) {
  const refresh = () => {
    if (document.visibilityState === "visible") node.dispatchEvent(new CustomEvent("refresh"));
  };
  setInterval(refresh, 1000 * Number(node.dataset.poll));
  document.addEventListener("visibilitychange", refresh);
}
