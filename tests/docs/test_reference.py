"""What the code writes of itself leaves nothing out: every field, operation, command, setting and formula."""

from __future__ import annotations

import ast
import html
import json
import re
from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel

from jobs.api.document.schema import document
from manual.nav import PARTS, nav
from manual.reference import PAGES, command, formulas, words
from planner.cost.traffic import step_traffic
from planner.facts import spec
from planner.facts.parse_spec import parse_spec
from planner.search.auto_layout import AutoSpec
from tests.screens.pictures import JOBS
from tests.support.processes import ROOT
from webapp.environment import RunnerSettings, WebSettings


def section(page: str, heading: str) -> str:
    """What stands under a heading, to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.M | re.S)
    assert found, f"no section {heading!r}"
    return found[1]


def cells(text: str) -> set[str]:
    """What the first cells of a section's tables hold, as code."""
    return {html.unescape(name) for name in re.findall(r"^\| <code>(.*?)</code>", text, re.M)}


MODELS = [model for model in vars(spec).values() if isinstance(model, type) and issubclass(model, spec.StrictModel)]


@pytest.mark.parametrize(
    "model", [m for m in (*MODELS, AutoSpec) if m is not spec.StrictModel], ids=lambda m: m.__name__
)
def test_every_field_of_the_spec_is_there_with_its_meaning(model: type[BaseModel]) -> None:
    page = PAGES["reference/spec.md"]()
    told = section(page, model.__name__)
    assert cells(told) == set(model.model_fields)
    for name, field in model.model_fields.items():
        told_of = next(line for line in told.splitlines() if line.startswith(f"| {words.code(name)} |"))
        meaning = field.description or getattr(spec.Layout.model_fields.get(name), "description", None)
        assert words.plain(meaning or "") in told_of
        assert meaning or "](#" in told_of, f"{name} has neither a meaning nor a shape of its own"


def test_every_operation_is_there_with_its_parameters_and_answers() -> None:
    page, told = PAGES["reference/rest.md"](), document()
    operations = [(path, method, one) for path, methods in told["paths"].items() for method, one in methods.items()]
    assert len(operations) > 30
    for path, method, operation in operations:
        under = section(page, words.code(f"{method.upper()} {path}"))
        assert cells(under) >= {p["name"] for p in operation.get("parameters", ())} | set(operation["responses"]), path
    for name, schema in told["components"]["schemas"].items():
        assert cells(section(page, name)) == set(schema.get("properties", ())), name


def test_every_command_and_option_is_there() -> None:
    page = PAGES["reference/command.md"]()
    found = dict(command.every(command.application()))
    assert {"login", "submit", "gate"} <= set(found)
    for name, one in found.items():
        told = section(page, f"meshboard {name}")
        for parameter in one.params:
            assert any(
                parameter.opts[-1].upper() in cell.upper() or (parameter.metavar or "-") in cell for cell in cells(told)
            ), (name, parameter.name)


@pytest.mark.parametrize("model", [WebSettings, RunnerSettings])
def test_every_setting_is_there(model: Any) -> None:
    page = PAGES["reference/settings.md"]()
    assert cells(page) >= {f"MESHBOARD_{name.upper()}" for name in model.model_fields}


def test_every_function_of_the_planner_s_costs_that_says_what_it_is_is_there() -> None:
    page = PAGES["reference/formulas.md"]()
    told = [node for path in formulas.modules() for node in formulas.public(ast.parse(path.read_text()))]
    assert len(told) > 100
    for node in told:
        assert re.search(rf"^### <code>{re.escape(node.name)}[<(]", page, re.M), node.name
    for figure in ("Parameters", "Memory", "Traffic"):
        assert f"### {figure} (" in page


def test_what_a_cell_must_not_hold_is_escaped() -> None:
    row = words.table(["a"], [[words.code("x|y<z>")], [words.plain("a_b *c* <img src=x> `x_y`")]])
    assert "<code>x&#124;y&lt;z&gt;</code>" in row
    assert r"a\_b \*c\* &lt;img src=x&gt; `x_y`" in row


def test_a_page_that_nobody_listed_stands_in_its_folder_s_part() -> None:
    found = nav(["index.md", "howto/new.md", "strange.md", "tutorial/index.md"])
    assert found == [
        "index.md",
        {"Tutorial": ["tutorial/index.md"]},
        {"How to": ["howto/new.md"]},
        {"Reference": ["strange.md"]},
    ]


def test_what_the_order_lists_is_there_or_will_be() -> None:
    """A page that was moved must not fall out of its place unseen; others' pages may come later."""
    listed = {page for _, order in PARTS.values() for page in order}
    there = {str(f.relative_to(ROOT / "docs")) for f in (ROOT / "docs").rglob("*.md")} | set(PAGES)
    assert {page for page in listed - there if "/" in page} == set()


STRATEGIES = (ROOT / "docs/explanation/strategies.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (\w+) \| `(\w+)` \| ([\d,]+) \|$", STRATEGIES, re.M)
RUNS = {run: layout for run, layout, *_ in ROWS}


@pytest.mark.parametrize("run", RUNS)
def test_what_the_strategies_page_says_of_its_runs_is_what_the_planner_says(run: str) -> None:
    asked = JOBS[run]
    assert asked["layout"] == json.loads(RUNS[run])
    sent: Counter[tuple[str, str]] = Counter()
    for one in step_traffic(parse_spec(asked), 0):
        sent[one.axis, one.op] += one.payload_bytes
    assert sent.pop(("world", "all_reduce")) == 16
    told = [(axis, op, size) for name, _, axis, op, size in ROWS if name == run]
    assert sorted(told) == sorted((axis, op, f"{size:,}") for (axis, op), size in sent.items())
    assert f"../pictures/step-{run}.png" in STRATEGIES


def test_each_strategy_has_its_row_and_the_tutorial_its_numbers() -> None:
    assert list(RUNS) == ["dp", "zero", "tp", "sp", "pp", "cp", "ep"]
    tutorial = (ROOT / "docs/tutorial/index.md").read_text()
    sent = {(one.axis, one.op): 0 for one in step_traffic(parse_spec(JOBS["first"]), 0)}
    for one in step_traffic(parse_spec(JOBS["first"]), 0):
        sent[one.axis, one.op] += one.payload_bytes
    rows = re.findall(r"^\| (\w+) \| ([a-z-]+) \| ([\d,]+) \|", tutorial, re.M)
    assert {(axis, op.replace("-", "_")): int(size.replace(",", "")) for axis, op, size in rows} == sent
