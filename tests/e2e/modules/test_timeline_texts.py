"""The texts, colors and legend of a timeline."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import call_module, open_blank_page
from tests.support.telemetry import build_late_rank_step, build_timeline

pytestmark = pytest.mark.extended

SHEETS = ("css/tokens.css", "css/base.css")
STEPS = """
const { stepOfItems } = await import('/js/timeline/step.js');
const told = (items) => new Map(items.map((item) => [item.rank, { item, node: 0 }]));
const made = (items) => stepOfItems(items[0].step, told(items), () => 0);
const place = document.getElementById('place');
const view = m.timelineView(place);
"""
HEARD = """
const { createState } = await import('/js/store.js');
const { foldTimeline } = await import('/js/timeline/fold.js');
const state = createState();
for (const item of x.items) foldTimeline(state, item, 0);
x.clocks.forEach((clock, node) => state.members.set(node, { clock }));
const show = m.timelinePanel(document.getElementById("panel"), null, () => {});
show({ attempt: 1, finished: true, world_size: 4, members: [] }, state);
"""
PANEL = """<section id="panel" data-trace="/trace">
<select id="timeline-step"><option value="">latest step</option></select>
<div id="step-timeline"></div><p data-empty></p><p id="timeline-note"></p><p id="timeline-bubble"></p>
<form id="timeline-ask"></form><table class="timeline-tables"><tbody id="timeline-collectives"></tbody>
<tbody id="timeline-groups"></tbody><tbody id="timeline-overlap"></tbody></table></section>"""


def test_event_description_disappears_with_its_step(modules: Page) -> None:
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        call_module(
            page,
            "timeline/view.js",
            f"{STEPS} window.see = (items) => view.show(made(items)); see(x);",
            build_late_rank_step(),
        )
        shown = page.locator(".timeline-status")
        page.locator("canvas").press(".")
        expect(shown).to_contain_text("rank 0")
        page.evaluate("see", build_late_rank_step(step=9))
        expect(shown).to_contain_text("To zoom, use the wheel, +")


def test_full_view_of_a_step_stays_full_when_ranks_arrive(modules: Page) -> None:
    body = (
        f"{STEPS} view.show(made(x.slice(0, 1))); view.show(made(x)); return place.querySelector('canvas').dataset.to"
    )
    shorter = build_timeline(0, spans=[("forward", 0, 0, 0, 20_000)])
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        assert float(
            call_module(page, "timeline/view.js", body, [shorter, build_late_rank_step()[1]])
        ) == pytest.approx(0.09)


def test_repeated_step_preserves_the_selection(modules: Page) -> None:
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        call_module(
            page,
            "timeline/view.js",
            f"{STEPS} const step = made(x); (window.see = () => view.show(step))();",
            build_late_rank_step(),
        )
        page.locator("canvas").press(".")
        page.evaluate("see()")
        expect(page.locator(".timeline-status")).to_contain_text("rank 0")


@pytest.mark.parametrize(
    ("ranks", "spans", "shown", "untold"),
    [
        (2, [("weights", 0, 3, 0, 9)], ["weights", "the solid part is data transfer."], ["backward", "because"]),
        (
            1,
            [("forward", 0, 3, 0, 9)],
            ["forward (F)", "backward (B)", "because events of rank 1 are missing."],
            ["no matching"],
        ),
    ],
)
def test_legend_lists_the_drawn_colors(
    modules: Page, ranks: int, spans: list[tuple[Any, ...]], shown: list[str], untold: list[str]
) -> None:
    """The legend includes weight passes and unknown waiting times."""
    calls = [(0, "all_reduce", 1, 10, 0, 20, 4000, -1)]
    items = [build_timeline(rank, spans=spans, calls=calls) for rank in range(ranks)]
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        words = call_module(
            page,
            "timeline/view.js",
            f"{STEPS} view.show(made(x)); return place.querySelector('.legend').textContent",
            items,
        )
    assert [one for one in shown if one not in words] == []
    assert [one for one in untold if one in words] == []


def test_legend_explains_unknown_waiting_times(modules: Page) -> None:
    calls = [(0, "all_reduce", 1, 10, 0, 20, 4000, -1)]
    items = [build_timeline(0, calls=calls), build_timeline(1, calls=[(0, "all_reduce", 2, 10, 0, 20, 4000, -1)])]
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        made = f"{STEPS} view.show(made(x)); return place.querySelector('.legend').textContent"
        words = call_module(page, "timeline/view.js", made, items)
    assert "unknown, because the other ranks recorded no matching event." in words


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_event_names_are_readable_on_every_shade(modules: Page, theme: str) -> None:
    tokens = ["--part-compute", "--part-compute-odd", "--part-optimizer", "--series-11"]
    tokens += [f"--axis-{axis}" for axis in ("dp", "tp", "pp", "cp", "ep", "world")]
    body = """
    document.documentElement.dataset.theme = x.theme;
    const { color } = await import('/js/charts/theme.js');
    const { BACKWARD_ALPHA, UNKNOWN_ALPHA, WAITING_ALPHA } = await import('/js/timeline/colors.js');
    const surface = m.channels(color('--surface'));
    return x.tokens.flatMap((token) => [1, BACKWARD_ALPHA, UNKNOWN_ALPHA, WAITING_ALPHA].map((alpha) => {
      const box = m.blend(m.channels(color(token)), surface, alpha);
      return m.contrast(m.textOn(box) === '#000000' ? [0, 0, 0] : [255, 255, 255], box);
    }));
    """
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        ratios = call_module(page, "charts/contrast.js", body, {"theme": theme, "tokens": tokens})
    assert len(ratios) == 40
    assert min(ratios) >= 4.5


def test_event_names_match_the_color_of_their_box(modules: Page) -> None:
    calls = [[(0, "all_reduce", 1, start, 0, 100_000, 4000, -1)] for start in (0, 90_000)]
    items = [build_timeline(rank, calls=own) for rank, own in enumerate(calls)]
    body = f"""{STEPS}
    const drawn = [];
    const pen = {{ measureText: () => ({{ width: 20 }}), fillText(text) {{ drawn.push([text, this.fillStyle]); }} }};
    const context = new Proxy(pen, {{ get: (own, name) => own[name] ?? (() => {{}}) }});
    const {{ arrangeRows }} = await import('/js/timeline/lanes.js');
    const {{ paint }} = await import('/js/timeline/paint.js');
    const step = made(x);
    const frame = {{ width: 1064, height: 200, left: 64, top: 0, rowHeight: 16, gap: 4 }};
    const ink = (token) => (token === '--surface' ? 'rgb(255, 255, 255)' : 'rgb(10, 20, 120)');
    paint(context, arrangeRows(step), step, {{ from: 0, to: step.seconds }}, frame, ink, () => '--axis-dp');
    return drawn.filter(([text]) => text === 'all_reduce').map(([, ink]) => ink);
    """
    with open_blank_page(modules, '<main><div id="place"></div></main>', *SHEETS) as page:
        waiting, transfer = call_module(page, "timeline/view.js", body, items)
    assert (waiting, transfer) == ("#000000", "#ffffff")


def test_group_of_a_script_has_one_color_in_pictures_and_tables(modules: Page) -> None:
    groups = [{"axis": name, "ranks": [0, 1], "nth": 0} for name in ("ours", "theirs")]
    both = [(place, "all_reduce", 1, 10, 0, 20, 4000, -1) for place in (0, 1)]
    steps = [
        [build_timeline(rank, step=step, groups=groups, calls=calls) for rank in (0, 1)]
        for step, calls in ((1, both), (2, both[1:]))
    ]
    body = f"""{STEPS}
    const {{ showOverlap }} = await import('/js/timeline/tables.js');
    const swatch = (node) => node.querySelector('[style]').getAttribute('style');
    view.show(made(x[1]));
    showOverlap(document.querySelector('tbody'), made(x[0]), null);
    const [, theirs] = document.querySelectorAll('tr');
    return [swatch(place.querySelector('.legend')), swatch(theirs)];
    """
    with open_blank_page(modules, '<main><div id="place"></div><table><tbody></tbody></table></main>', *SHEETS) as page:
        picture, table = call_module(page, "timeline/view.js", body, steps)
    assert picture == table


@pytest.mark.parametrize(
    ("within", "shown"),
    [
        ([0.001], ""),
        ([0.001, 0.003, 0.002], " The clocks of the hosts differ by at most 5.00 ms."),
        ([0.001, None], " The clock offset of 1 host is unknown."),
    ],
)
def test_step_shows_its_ranks_and_clock_offsets(modules: Page, within: list[float | None], shown: str) -> None:
    """Each clock is compared with that of the board, so two errors add up."""
    clocks = [None if one is None else {"offset_s": 0, "within_s": one} for one in within]
    with open_blank_page(modules, PANEL, *SHEETS) as page:
        page.route("**/trace/**", lambda route: route.fulfill(json={"steps": []}))
        call_module(page, "timeline/panel.js", HEARD, {"items": build_late_rank_step(), "clocks": clocks})
        expect(page.locator("#timeline-note")).to_have_text(f"Step 8, 2 of 4 ranks.{shown}")


def test_small_chart_of_a_rank_without_data_has_a_note(modules: Page) -> None:
    body = """
    const { Bins } = await import('/js/rates.js');
    const bins = new Bins(1, 10, 'whole');
    bins.add(0, 'dp/all_reduce', 10, 5);
    const words = (value) => (Number.isNaN(value) ? 'not known' : String(value));
    const ranks = Array.from({ length: 130 }, (_, i) => 1000 + i);
    const cells = new Float32Array(2 * 130).fill(1);
    cells.fill(NaN, 0, 2);
    const draw = m.multiples(document.querySelector('#place'), document.querySelector('details'));
    draw(bins, { columns: 2, times: [10, 11], cells }, ranks, { words });
    return [...document.querySelectorAll('#place .note')].map((one) => one.textContent);
    """
    with open_blank_page(modules, '<main><details open></details><div id="place"></div></main>', *SHEETS) as page:
        notes = call_module(page, "heat/multiples.js", body)
    assert notes[1:3] == ["not known", "\u2264 1"]
    assert notes[-1] == "These charts show the first 128 of 130 ranks. The rank heatmap shows all ranks."
