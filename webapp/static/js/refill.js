// Updates tables several times per second. Unchanged nodes stay, because clicks, focus, and selections depend on them.

/** Replace the content of `place` by `nodes`. A node with a `data-key` reuses the old node with this key, others by position. */
export function refill(place, ...nodes) {
  const keys = new Set(nodes.map(getKey));
  for (const child of [...place.children]) if (getKey(child) !== undefined && !keys.has(getKey(child))) child.remove();
  const byKey = new Map([...place.children].map((child) => [getKey(child), child]));
  nodes.forEach((node, at) => {
    const there = place.childNodes[at] ?? null;
    const before = getKey(node) === undefined ? there : (byKey.get(getKey(node)) ?? null);
    if (before !== there || before === null) place.insertBefore(before ?? node, there);
    if (before !== null && !before.isEqualNode(node)) turn(before, node);
  });
  while (place.childNodes.length > nodes.length) place.lastChild.remove();
}

const getKey = (node) => node.dataset?.key;

function turn(old, node) {
  if (old.nodeName !== node.nodeName) old.replaceWith(node);
  else if (old.nodeType === Node.TEXT_NODE) old.data = node.data;
  else {
    for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of node.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    old.style.cssText = node.style.cssText; // the page's policy forbids the attribute
    refill(old, ...node.childNodes);
  }
}
