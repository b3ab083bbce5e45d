"""Pages whose scripts load slowly: use them early, and detect elements that move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, Route

MOST = 0.005  # of layout shift: a line of text that pushes the charts down is four times that

# Each answer and each message of a socket waits until what came before it has been painted.
WATCH = """
(() => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const { fetch } = window;
  window.fetch = async (...of) => {
    const answer = await fetch(...of);
    await painted();
    return answer;
  };
  window.WebSocket = class extends WebSocket {
    addEventListener(name, listener, ...how) {
      super.addEventListener(name, (event) => painted().then(() => listener(event)), ...how);
    }
  };
  const name = (node) => {
    const element = node?.closest ? node : node?.parentElement;
    if (!element) return "something that is gone";
    const named = element.closest("[id]");
    const own = element.localName + (element.className ? `.${element.className}` : "");
    return named === element ? `#${element.id}` : `${own} in ${named ? `#${named.id}` : "the page"}`;
  };
  const box = ({ x, y, width, height }) => [x, y, width, height].map(Math.round).join(" ");
  window.moved = [];
  new PerformanceObserver((list) => {
    for (const { value, startTime, hadRecentInput, sources } of list.getEntries()) {
      if (hadRecentInput) continue;
      const from = sources.map((one) => `${name(one.node)}: ${box(one.previousRect)} -> ${box(one.currentRect)}`);
      window.moved.push({ value, at: Math.round(startTime), from });
    }
  }).observe({ type: "layout-shift", buffered: true });
})()"""
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
PAINTED = """new Promise((done) => {
  const look = () => {
    const written = document.readyState !== "loading" && performance.getEntriesByName("first-contentful-paint").length;
    requestAnimationFrame(written ? () => requestAnimationFrame(done) : look);
  };
  look();
})"""


@contextmanager
def hold_modules(page: Page, url: str) -> Iterator[None]:
    """Open a page, and keep its modules back until the end of the context. The page has been painted before."""
    held: list[Route] = []
    modules = re.compile(r"/js/(?!theme|early)")

    def hold(route: Route) -> None:
        held.append(route)

    page.route(modules, hold)
    page.goto(url, wait_until="commit")
    page.evaluate(PAINTED)
    yield
    for route in held:
        route.continue_()
    page.unroute(modules)


def open_late(page: Page, url: str) -> None:
    """Open a page whose scripts start after the first paint, and whose responses arrive one frame at a time."""
    page.add_init_script(WATCH)
    with hold_modules(page, url):
        pass


def assert_still(page: Page) -> None:
    """Check that no element moved on a page of `open_late`."""
    page.evaluate(FRAMES)
    moved: list[dict[str, Any]] = page.evaluate("window.moved")
    shown = [f"{one['value']:.4f} at {one['at']} ms\n    " + "\n    ".join(one["from"]) for one in moved]
    assert sum(one["value"] for one in moved) < MOST, "\n".join(["the page moved by itself", *shown])
