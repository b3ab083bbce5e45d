"""Fields of the job form and layouts of the Planner on narrow pages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page, Route, expect

from tests.support.browser import call_module, open_blank_page, wait_for_requests

pytestmark = pytest.mark.extended

SHEETS = tuple(f"css/{name}.css" for name in ("tokens", "base", "components", "fields", "plan", "form"))
TOUCHES = """() => {
  const why = document.querySelector('.why-not').getBoundingClientRect();
  return [...document.querySelectorAll('.segmented label, .other-degree, legend')]
    .map((one) => [one.textContent || 'other', one.getBoundingClientRect()])
    .filter(([, box]) => box.right > why.left && box.left < why.right)
    .filter(([, box]) => box.bottom > why.top + 1 && box.top < why.bottom - 1)
    .map(([name]) => name);
}"""
CUT = """(words) => {
  const box = document.querySelector('.other-degree');
  const { font, paddingLeft, paddingRight } = getComputedStyle(box);
  const pen = document.createElement('canvas').getContext('2d');
  pen.font = font;
  const width = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  return words.filter((word) => pen.measureText(word).width > width);
}"""
BASE = """<form id="base" data-plan-url="/plan" data-search-url="/search" data-new-url="/new">
<input name="csrfmiddlewaretoken" value="t"><input name="preset" value="gpt-tiny"><input name="ranks" value="64">
<input name="global_batch" value="8"><input name="seq_len" value="64"><input name="precision" value="bf16">
<select name="cluster"><option value="h100" data-device="cuda"></option><option value="own:"></option></select>
<fieldset data-own-accelerator></fieldset>
<select name="resources.stack"><option value="ours"></option></select>FIELDS</form>
<script id="schedules" type="application/json">{"1f1b": {"label": "1F1B", "chunks": 1}}</script>
<div id="lanes"></div><button id="add"></button><button id="link"></button><p id="linked"></p>
<button id="search"></button><p id="search-status"></p><div id="results"></div>"""
FIELDS = ("memory_options", "config_import", "layout_import")


def render_base() -> str:
    """Return the elements of the Planner that its module needs."""
    return BASE.replace("FIELDS", "".join(render_to_string(f"jobs/fields/{name}.html") for name in FIELDS))


@pytest.mark.parametrize("width", [328, 337, 700])  # in a page of 390, 1440, and 900 px
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reasons_of_a_field_do_not_overlap_choices(modules: Page, width: int, theme: str) -> None:
    name = "layout.ep"
    shown = {
        "name": name,
        "label": "Expert parallel (ep)",
        "hint": "Shards experts over dp and cp. Default 1.",
        "other": True,
        "options": {name: [(value, value) for value in ("1", "2", "4", "8", "4096")]},
        "values": {name: "4096"},
        "unavailable": {name: ["8"]},
        "reasons": {name: [("not divisible", ["8"])]},
        "errors": {name: "`layout.ep` is 4096."},
    }
    field = render_to_string("jobs/fields/segmented.html", shown)
    made = f'<main class="bench"><div style="width: {width}px">{field}</div></main>'
    with open_blank_page(modules, made, *SHEETS) as page:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        expect(page.locator(".why-not")).to_be_visible()
        assert page.evaluate(TOUCHES) == []
        assert page.evaluate(CUT, ["other", "4096", "65536"]) == []
        assert page.locator(".segmented").evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_search_at_its_limit_names_the_next_step(modules: Page) -> None:
    found = {"complete": False, "seconds": 5, "considered": 90, "total": 700, "fitting": 0, "best": [], "refused": {}}
    with open_blank_page(modules, f"<main>{render_base()}</main>") as page:
        page.route("**/plan?cluster=h100", lambda route: route.fulfill(status=400, json={"problems": []}))
        page.route("**/search", lambda route: route.fulfill(json=found))
        fields = '<input id="s-micro" value="16"><input id="s-fixed"><input id="s-runnable" type="checkbox">'
        page.evaluate("(fields) => document.querySelector('main').insertAdjacentHTML('beforeend', fields)", fields)
        call_module(page, "plan/planner.js", "")
        page.click("#search", force=True)
        expect(page.locator("#search-status")).to_contain_text("90 of 700 layouts estimated, 0 fit")
        expect(page.locator("#search-status code")).to_have_text("python -m planner search")


def test_layouts_show_loading_until_the_plan_arrives(modules: Page) -> None:
    """The two lanes of a fresh page are valid, and are planned without a click."""
    held: list[Route] = []
    refused = {"estimate": None, "problems": [{"field": "layout.dp", "message": "`layout.dp` is 64."}]}
    with open_blank_page(modules, f"<main>{render_base()}</main>") as page:
        page.route("**/plan?cluster=h100", lambda route: held.append(route))
        call_module(page, "plan/planner.js", "")
        bodies = page.locator(".lane > div:last-child")
        expect(bodies).to_have_text(["Loading…", "Loading…"])
        wait_for_requests(page, held, 2)
        sent: list[Any] = [json.loads(route.request.post_data or "") for route in held]
        assert [spec["layout"].get("tp", 1) for spec in sent] == [1, 4]
        for route in held:
            route.fulfill(json=refused)
        expect(bodies).to_have_text(["layout.dp is 64.", "layout.dp is 64."])
        expect(page.locator("[data-reading]")).to_have_count(0)
