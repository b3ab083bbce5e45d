// Makes boxes that scroll sideways focusable, so keys can scroll them.
const SELECTOR = ".scroll-x, .scrolls";

const seen = new ResizeObserver((entries) => {
  for (const box of new Set(entries.map(({ target }) => target.closest(SELECTOR)))) {
    if (!box || box.hasAttribute("role")) continue; // boxes with a role are already focusable
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
});

function watch(root) {
  const boxes = [...root.querySelectorAll(SELECTOR)];
  if (root.matches?.(SELECTOR)) boxes.push(root);
  for (const box of boxes) for (const node of [box, ...box.children]) seen.observe(node);
}

watch(document.body);
new MutationObserver((changes) => {
  for (const { addedNodes, target } of changes) {
    for (const node of addedNodes) {
      if (!(node instanceof Element)) continue;
      watch(node);
      if (target instanceof Element && target.matches(SELECTOR)) seen.observe(node);
    }
  }
}).observe(document.body, { childList: true, subtree: true });
