// What mkdocs' own search asks for: where the site begins. A classic script, as its are.
var base_url = document.documentElement.dataset.base;

document.addEventListener("keydown", (event) => {
  const input = document.getElementById("mkdocs-search-query");
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || document.activeElement === input) return;
  event.preventDefault();
  input.focus();
});
