// Runs before the page paints, so it is a classic script in the head: no flash of the other theme.
(() => {
  const KEY = "meshboard-theme";
  const root = document.documentElement;
  root.dataset.script = "on"; // what only a script can open starts closed, without a jump
  let saved = null;
  try {
    saved = localStorage.getItem(KEY);
  } catch {
    // Storage may be forbidden; the system's theme stays.
  }
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;

  const isDark = () => {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  };

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-toggle");
    if (!button) return;
    const show = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
      document.dispatchEvent(new CustomEvent("themechange"));
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // The choice then lasts for this page only.
      }
      show();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
    show();
  });
})();
