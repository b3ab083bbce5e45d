"""Measure how long Chromium draws a run: heat maps of 1,000 ranks, and a traced step of 64 ranks.

The data is synthetic. Figures are the median and the maximum of many draws, in milliseconds of script and canvas.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from tests.support.browser import run_chromium, serve_static_files

DRAWS = 60

DRAW_HEAT_MAP = """
async ([ranks, columns, draws]) => {
  const { heatMap } = await import('/js/heat/map.js');
  const place = document.body.appendChild(document.createElement('div'));
  const map = heatMap(place, { label: 'x', told: () => '', onTell: () => {} });
  const cells = Float32Array.from({ length: ranks * columns }, (_, i) => (i * 7919) % 1000);
  const times = [];
  for (let i = 0; i < draws; i += 1) {
    cells[i] += 1;
    const began = performance.now();
    map.show(cells, { rows: ranks, columns, most: 1000 });
    place.querySelector('canvas').getContext('2d').getImageData(0, 0, 1, 1);
    times.push(performance.now() - began);
  }
  return times;
}
"""
FOLD_BINS = """
async ([ranks, columns, draws]) => {
  const { Bins } = await import('/js/rates.js');
  const { computeCells } = await import('/js/heat/cells.js');
  const bins = new Bins(0.5, 1200, 'whole');
  for (let c = 0; c < columns; c += 1)
    for (let r = 0; r < ranks; r += 1)
      for (const key of ['dp/all_reduce', 'tp/all_reduce']) bins.add(r, key, 1000 + c / 2, r + c);
  const all = [...bins.rows.keys()];
  const times = [];
  for (let i = 0; i < draws; i += 1) {
    const began = performance.now();
    computeCells(bins, all, () => true);
    times.push(performance.now() - began);
  }
  return times;
}
"""
DRAW_TIMELINE = """
async ([ranks, events, draws]) => {
  const { stepOfItems } = await import('/js/timeline/step.js');
  const { arrangeRows } = await import('/js/timeline/lanes.js');
  const { paint } = await import('/js/timeline/paint.js');
  const { heights } = await import('/js/timeline/view.js');
  const told = new Map();
  const half = events / 2;
  for (let rank = 0; rank < ranks; rank += 1) {
    const each = (f) => Array.from({ length: half }, (_, i) => f(i));
    told.set(rank, { node: 0, item: { rank, step: 1, began: 1000, left_out: 0,
      groups: ['dp', 'tp'].map((axis) => ({ axis, nth: 0, ranks: Array.from({ length: ranks }, (_, r) => r) })),
      calls: { group: each((i) => i % 2), op: each(() => 'all_reduce'), sequence: each((i) => 1 + (i >> 1)),
        issued_us: each((i) => 100 * i + rank), blocked_us: each(() => 5), ended_us: each((i) => 100 * i + 90),
        payload_bytes: each(() => 1e6), peer: each(() => -1) },
      spans: { work: each(() => 'forward'), chunk: each(() => 0), micro_batch: each((i) => i % 8),
        from_us: each((i) => 100 * i), to_us: each((i) => 100 * i + 60) } } });
  }
  let began = performance.now();
  const step = stepOfItems(1, told, () => 0);
  const rows = arrangeRows(step);
  const made = performance.now() - began;
  const canvas = document.body.appendChild(document.createElement('canvas'));
  [canvas.width, canvas.height] = [1400, 620];
  const context = canvas.getContext('2d');
  const frame = { width: 1400, height: 620, left: 64, top: 0, ...heights(rows) };
  const times = [];
  const ink = (token) => token.includes('axis') ? '#c33' : '#36c';
  const tokens = (event) => event.work ? `--series-${event.micro}` : '--axis-dp';
  for (let i = 0; i < draws; i += 1) {
    const width = step.seconds / (1 + i);
    const from = 0.3 * (step.seconds - width);
    began = performance.now();
    paint(context, rows, step, { from, to: from + width }, frame, ink, tokens);
    context.getImageData(0, 0, 1, 1);
    times.push(performance.now() - began);
  }
  return [made, ...times];
}
"""


def main() -> None:
    with serve_static_files() as address, run_chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}/js/")
        measure_draws(page)


def measure_draws(page: Page) -> None:
    print("made-up events; milliseconds of script and canvas, median and worst")
    print_times("heat map, 1,000 ranks x 300 bins, drawn", page.evaluate(DRAW_HEAT_MAP, [1000, 300, DRAWS]))
    print_times("the same, summed from the page's counters", page.evaluate(FOLD_BINS, [1000, 300, DRAWS]))
    print_times("heat map, 1,024 x 1,024 pairs, drawn", page.evaluate(DRAW_HEAT_MAP, [1024, 1024, DRAWS]))
    made, *times = page.evaluate(DRAW_TIMELINE, [64, 2000, DRAWS])
    print(f"{'a step of 64 ranks x 2,000 events put together, once':58} {made:7.1f}")
    print_times("the same, drawn whole and in 59 closer views", times)


def print_times(what: str, times: list[Any]) -> None:
    ordered = sorted(times)
    print(f"{what:58} {ordered[len(ordered) // 2]:7.1f} {ordered[-1]:7.1f}")


if __name__ == "__main__":
    main()
