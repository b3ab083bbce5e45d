// What mkdocs' own search asks for: where the site begins. A classic script, as its are.
var base_url = document.documentElement.dataset.base;

document.addEventListener("DOMContentLoaded", () => {
  // On a phone the pages would stand before the page.
  if (!matchMedia("(max-width: 48rem)").matches) return;
  for (const part of document.querySelectorAll(".pages details")) part.open = false;
});

document.addEventListener("keydown", (event) => {
  const input = document.getElementById("mkdocs-search-query");
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || document.activeElement === input) return;
  event.preventDefault();
  input.focus();
});
