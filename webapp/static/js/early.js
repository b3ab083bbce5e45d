// Repeats the actions of users for modules, which start to listen after the page has loaded.
// This is a classic script in the head, so it records actions from the first paint.
(() => {
  const types = ["input", "change", "click", "submit"];
  const actions = new Map();

  const record = (event) => {
    const { type } = event;
    const target = type === "click" ? event.target.closest("button[type=button]") : event.target;
    if (!target || (type === "submit" && target.hasAttribute("method"))) return;
    if (type === "submit") event.preventDefault(); // A form without a method is sent by a module.
    actions.set(target, new Set([...(actions.get(target) ?? []), type]));
  };

  const repeat = (target, type) => {
    if (type === "submit") target.requestSubmit();
    else if (type === "click") target.click();
    else target.dispatchEvent(new Event(type, { bubbles: true }));
  };

  for (const type of types) document.addEventListener(type, record, true);
  document.addEventListener("DOMContentLoaded", () => {
    for (const type of types) document.removeEventListener(type, record, true);
    setTimeout(() => {
      for (const [target, seen] of actions) for (const type of seen) repeat(target, type);
    }); // The other listeners of this event come first.
  });
})();
