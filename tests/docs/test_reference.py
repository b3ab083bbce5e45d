"""Generated reference pages list every field, operation, command, setting, and formula.

The files in examples/, which the documentation uses in its commands, work.

Check that the source files named by docs/reference/bounds.md exist.
"""

from __future__ import annotations

import ast
import html
import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from jobs.api.openapi import get_document
from manual.hooks import build_navigation, list_pages
from manual.reference import PAGES, formulas, markdown, pages
from planner.cost.traffic import get_step_traffic
from planner.facts import spec
from planner.facts.parse_spec import parse_spec
from planner.search.auto_layout import AutoSpec
from tests.screens.pictures import JOBS
from tests.support.processes import ROOT, scale_timeout
from webapp.environment import RunnerSettings, WebSettings


def section(page: str, heading: str) -> str:
    """Return the text of a heading up to the next heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.M | re.S)
    assert found, f"no section {heading!r}"
    return found[1]


def cells(text: str) -> set[str]:
    """Return the code in the first cells of the tables of a section."""
    return {html.unescape(name) for name in re.findall(r"^\| <code>(.*?)</code>", text, re.M)}


MODELS = [model for model in vars(spec).values() if isinstance(model, type) and issubclass(model, spec.StrictModel)]


@pytest.mark.parametrize(
    "model", [m for m in (*MODELS, AutoSpec) if m is not spec.StrictModel], ids=lambda m: m.__name__
)
def test_lists_every_spec_field(model: type[BaseModel]) -> None:
    page = PAGES["reference/spec.md"]()
    content = section(page, model.__name__)
    assert cells(content) == set(model.model_fields)
    for name, field in model.model_fields.items():
        row_text = next(line for line in content.splitlines() if line.startswith(f"| {markdown.format_code(name)} |"))
        meaning = field.description or getattr(spec.Layout.model_fields.get(name), "description", None)
        assert markdown.escape_markdown(meaning or "") in row_text
        assert meaning or "](#" in row_text, f"{name} has neither a meaning nor a shape of its own"


def test_lists_every_operation() -> None:
    page, content = PAGES["reference/rest.md"](), get_document()
    operations = [(path, method, one) for path, methods in content["paths"].items() for method, one in methods.items()]
    assert len(operations) > 30
    for path, method, operation in operations:
        under = section(page, markdown.format_code(f"{method.upper()} {path}"))
        assert cells(under) >= {p["name"] for p in operation.get("parameters", ())} | set(operation["responses"]), path
    for name, schema in content["components"]["schemas"].items():
        assert cells(section(page, name)) == set(schema.get("properties", ())), name


def test_lists_every_command_and_option() -> None:
    page = PAGES["reference/command.md"]()
    found = dict(pages.list_commands(pages.get_command()))
    assert {"login", "submit", "gate"} <= set(found)
    for name, one in found.items():
        content = section(page, f"meshboard {name}")
        for parameter in one.params:
            assert any(
                parameter.opts[-1].upper() in cell.upper() or (parameter.metavar or "-") in cell
                for cell in cells(content)
            ), (name, parameter.name)


@pytest.mark.parametrize("model", [WebSettings, RunnerSettings])
def test_lists_every_setting(model: Any) -> None:
    page = PAGES["reference/settings.md"]()
    assert cells(page) >= {f"MESHBOARD_{name.upper()}" for name in model.model_fields}


def test_lists_every_documented_planner_function() -> None:
    page = PAGES["reference/formulas.md"]()
    content = [node for path in formulas.list_modules() for node in formulas.list_public(ast.parse(path.read_text()))]
    assert len(content) > 100
    for node in content:
        assert re.search(rf"^### <code>{re.escape(node.name)}[<(]", page, re.M), node.name
    for figure in ("Parameters", "Memory", "Traffic"):
        assert f"### {figure} (" in page


def test_escapes_table_cells() -> None:
    row = markdown.format_table(
        ["a"], [[markdown.format_code("x|y<z>")], [markdown.escape_markdown("a_b *c* <img src=x> `x_y`")]]
    )
    assert "<code>x&#124;y&lt;z&gt;</code>" in row
    assert r"a\_b \*c\* &lt;img src=x&gt; `x_y`" in row


def test_unlisted_page_is_in_the_part_of_its_folder() -> None:
    found = build_navigation(["index.md", "howto/new.md", "strange.md", "tutorial/index.md"])
    assert found == [
        "index.md",
        {"Tutorial": ["tutorial/index.md"]},
        {"How to": ["howto/new.md"]},
        {"Reference": ["strange.md"]},
    ]


def test_listed_pages_exist() -> None:
    """Check that moved pages stay listed."""
    listed = set(list_pages())
    there = {str(f.relative_to(ROOT / "docs")) for f in (ROOT / "docs").rglob("*.md")} | set(PAGES)
    assert {page for page in listed - there if "/" in page} == set()


STRATEGIES = (ROOT / "docs/explanation/strategies.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (\w+) \| `(\w+)` \| ([\d,]+) \|$", STRATEGIES, re.M)
RUNS = {run: layout for run, layout, *_ in ROWS}


@pytest.mark.parametrize("run", RUNS)
def test_strategies_page_matches_the_planner(run: str) -> None:
    requested = JOBS[run]
    assert requested["layout"] == json.loads(RUNS[run])
    sent: Counter[tuple[str, str]] = Counter()
    for one in get_step_traffic(parse_spec(requested), 0):
        sent[one.axis, one.op] += one.payload_bytes
    assert sent.pop(("world", "all_reduce")) == 16
    content = [(axis, op, size) for name, _, axis, op, size in ROWS if name == run]
    assert sorted(content) == sorted((axis, op, f"{size:,}") for (axis, op), size in sent.items())
    assert f"../pictures/step-{run}.png" in STRATEGIES


def test_strategies_and_tutorial_have_current_numbers() -> None:
    assert list(RUNS) == ["dp", "zero", "tp", "sp", "pp", "cp", "ep"]
    tutorial = (ROOT / "docs/tutorial/index.md").read_text()
    sent = {(one.axis, one.op): 0 for one in get_step_traffic(parse_spec(JOBS["first"]), 0)}
    for one in get_step_traffic(parse_spec(JOBS["first"]), 0):
        sent[one.axis, one.op] += one.payload_bytes
    rows = re.findall(r"^\| (\w+) \| ([a-z-]+) \| ([\d,]+) \|", tutorial, re.M)
    assert {(axis, op.replace("-", "_")): int(size.replace(",", "")) for axis, op, size in rows} == sent


EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs/howto/own-script.md"


def test_guide_shows_the_example_script() -> None:
    shown = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert shown is not None
    assert shown[1] == (EXAMPLES / "train.py").read_text()


def test_meter_prints_the_traffic_of_the_example_script() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "workers.meter", "examples/train.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scale_timeout(120), check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Rank 0 after 20 steps." in ran.stderr
    assert re.search(r"^step +world +all_reduce +18 ", ran.stderr, re.M)


def test_example_spec_is_valid() -> None:
    spec = parse_spec(yaml.safe_load((EXAMPLES / "spec.yaml").read_text()))
    assert spec.layout.world_size == 4


PAGE = ROOT / "docs" / "reference" / "bounds.md"
BASE = re.compile(r"The column Code lists paths in `([^`]+)`")


def named_paths() -> list[tuple[str, str]]:
    """Return (base folder of the section, path) for each path in a last column."""
    named = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M):
        base = match[1] if (match := BASE.search(section)) else ""
        cells = (line.strip("| ").rsplit("|", 1)[-1] for line in section.splitlines() if line.startswith("| "))
        named += [(base, path) for cell in cells for path in re.findall(r"`([\w/]+(?:\.\w+|/))`", cell)]
    return named


def test_paths_for_contributors_exist() -> None:
    folders = "contracts|planner|workers|jobs|webapp|client|templates|manual|benchmarks|examples|tests|docs|deploy|ci"
    named = {
        (str(page.relative_to(ROOT)), path)
        for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "development").glob("*.md"))
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text())
    }
    assert len(named) > 40
    assert [one for one in sorted(named) if not (ROOT / one[1]).exists()] == []


def test_code_of_each_limit_exists() -> None:
    named = named_paths()
    assert len(named) > 100
    assert [path for base, path in named if not (ROOT / path).exists() and not (ROOT / base / path).exists()] == []
