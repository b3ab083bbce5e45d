// What is wrong with a page as it stands: read by tests/screens/look.py.
() => {
  const found = [];
  const name = (node) => {
    const own = node.id ? `#${node.id}` : node.className && typeof node.className === "string" ? `.${node.className.trim().split(/\s+/).join(".")}` : "";
    return `${node.tagName.toLowerCase()}${own}`.slice(0, 80);
  };
  const words = (node) => node.textContent.trim().replace(/\s+/g, " ").slice(0, 50);
  const page = document.documentElement;
  if (page.scrollWidth > innerWidth) {
    const wide = [...document.querySelectorAll("body *")].filter((node) => {
      const box = node.getBoundingClientRect();
      return box.width > 0 && box.right > innerWidth + 1 && !scrollerOf(node);
    });
    found.push(`the page is ${page.scrollWidth} px wide: ${wide.slice(-3).map(name).join(", ")}`);
  }
  function scrollerOf(node) {
    for (let up = node.parentElement; up; up = up.parentElement) {
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(up).overflowX)) return up;
    }
    return null;
  }
  for (const node of document.querySelectorAll("body *")) {
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    if (box.width < 2 || box.height < 2 || !node.checkVisibility({ visibilityProperty: true })) continue;
    const hidden = node.closest(".visually-hidden, [aria-hidden=true], svg, canvas, .u-over");
    if (hidden) continue;
    const over = node.scrollWidth - node.clientWidth;
    const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (["hidden", "clip"].includes(style.overflowX) && over > 1 && node.clientWidth > 0) {
      const told = style.textOverflow === "ellipsis" && (node.title || node.closest("[title]"));
      if (!told && words(node)) found.push(`cut without an ellipsis and a title: ${name(node)} "${words(node)}"`);
    }
    if (["auto", "scroll"].includes(style.overflowX) && over > 1 && node.clientWidth > 0 && !node.matches("textarea, select, pre, .log, .simplebar-content-wrapper")) {
      if (!style.backgroundAttachment.includes("local")) found.push(`scrolls sideways without a sign: ${name(node)}`);
    }
    if (text && node.matches("button, .button, .badge, label, th, td, dt, dd, h1, h2, h3, a, p, span, li, summary")) {
      if (over > 1 && style.overflowX === "visible" && style.display !== "inline") {
        const outer = scrollerOf(node);
        if (!outer) found.push(`its words run out of it: ${name(node)} "${words(node)}" by ${over} px`);
      }
    }
  }
  return [...new Set(found)];
}
