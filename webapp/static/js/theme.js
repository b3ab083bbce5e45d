// Light or dark: the system's choice until the reader makes one, which stays in this browser.
const KEY = "meshboard-theme";
const root = document.documentElement;

function apply(theme) {
  if (theme) root.dataset.theme = theme;
}

apply(localStorage.getItem(KEY));

for (const button of document.querySelectorAll("[data-theme-toggle]")) {
  button.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    const next = dark ? "light" : "dark";
    localStorage.setItem(KEY, next);
    apply(next);
    document.dispatchEvent(new Event("themechange"));
  });
}
