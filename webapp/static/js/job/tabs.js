// The tabs of the job page. The hash of the address names the open tab, or a panel in the tab.
const LOG_LINE = /^log-/;

/** Whether an element is outside of any closed tab. */
export const isOpen = (node) => node !== null && node.closest("[role=tabpanel][hidden]") === null;

/** `opened()` is called after a tab opens. */
export function jobTabs(bar, opened) {
  const tabs = [...bar.querySelectorAll("[role=tab]")];
  const panels = new Map(tabs.map((tab) => [tab, document.getElementById(tab.getAttribute("aria-controls"))]));
  const shown = () => tabs.filter((tab) => !tab.hidden);
  const named = (name) => tabs.find((tab) => tab.dataset.tab === name);
  let target = null; // a panel to scroll to, until the reader scrolls
  let wanted = null; // the tab of the address, which can be hidden until its data arrives

  function select(tab) {
    for (const [one, panel] of panels) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
      panel.hidden = one !== tab;
    }
    bar.scrollLeft = Math.max(0, tab.offsetLeft + tab.offsetWidth / 2 - bar.clientWidth / 2);
    opened();
  }

  /** Open a tab at its beginning, and write its name to the address. */
  function choose(tab) {
    target = wanted = null;
    const { pathname, search } = location;
    history.replaceState(null, "", `${pathname}${search}${tab === tabs[0] ? "" : `#${tab.dataset.tab}`}`);
    select(tab);
    toBeginning(panels.get(tab));
  }

  function toBeginning(panel) {
    const begin = panel.getBoundingClientRect().top - bar.getBoundingClientRect().bottom;
    if (begin < 0) scrollBy(0, begin);
  }

  function follow() {
    const name = location.hash.slice(1);
    const panel = document.getElementById(LOG_LINE.test(name) ? "logs" : name)?.closest("section");
    const tab = named(name) ?? tabs.find((one) => panel && panels.get(one).contains(panel));
    if (!tab) return;
    wanted = tab;
    target = named(name) || LOG_LINE.test(name) ? null : panel;
    select(tab);
    if (target) toTarget();
    else toBeginning(panels.get(tab));
  }

  function toTarget() {
    if (target?.checkVisibility()) target.scrollIntoView();
  }

  bar.addEventListener("click", ({ target: clicked }) => {
    const tab = clicked.closest("[role=tab]");
    if (tab) choose(tab);
  });
  bar.addEventListener("keydown", (event) => {
    const all = shown();
    const at = all.indexOf(event.target);
    const next = { ArrowRight: all[(at + 1) % all.length], ArrowLeft: all.at(at - 1), Home: all[0], End: all.at(-1) }[event.key];
    if (at < 0 || !next) return;
    event.preventDefault();
    choose(next);
    next.focus({ preventScroll: true });
  });
  for (const name of ["wheel", "pointerdown", "keydown"]) addEventListener(name, () => (target = null), { passive: true });
  addEventListener("hashchange", follow);
  follow();

  /** Hide the tabs without panels to show. */
  return () => {
    for (const [tab, panel] of panels) {
      tab.hidden = tab !== tabs[0] && [...panel.children].every((child) => getComputedStyle(child).display === "none");
    }
    bar.hidden = shown().length < 2;
    const open = tabs.find((tab) => tab.tabIndex === 0);
    if (wanted && !wanted.hidden && wanted !== open) select(wanted);
    else if (open.hidden) select(tabs[0]);
    toTarget();
  };
}
