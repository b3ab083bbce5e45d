"""Every name that tests and benchmarks import of ours is there: a test that moved says so before the suite runs."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.test_floors import OURS, ROOT, imports

FILES = sorted(file for floor in ("tests", "benchmarks") for file in (ROOT / floor).rglob("*.py"))


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What can be imported from a module of ours: its top-level names, and a package's files. None: there is none."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir() and any(path.rglob("*.py")):
        inside = {entry.stem for entry in path.iterdir() if entry.suffix == ".py" or entry.is_dir()}
        own = path / "__init__.py"
        return frozenset(inside | (bound(ast.parse(own.read_text()).body) if own.exists() else set()))
    file = path.with_suffix(".py")
    return frozenset(bound(ast.parse(file.read_text()).body)) if file.exists() else None


def bound(body: list[ast.stmt]) -> set[str]:
    """Names that these statements bind in their own scope, branches and all."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def missing(source: str) -> list[str]:
    """Imports of ours that would fail."""
    found = []
    for node in imports(source):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in OURS:
            continue
        names = names_of(node.module)
        found += [
            f"{node.module}.{alias.name}" for alias in node.names if names is None or alias.name not in {*names, "*"}
        ]
    return found


def test_every_import_of_ours_names_something_that_is_there() -> None:
    wrong = {str(file.relative_to(ROOT)): names for file in FILES if (names := missing(file.read_text()))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from tests.test_floors import imported", []),
        ("from tests.support import processes", []),
        ("from tests.jobs.traces.test_imports import recorded", ["tests.jobs.traces.test_imports.recorded"]),
        ("def f():\n    from jobs.nowhere import Job", ["jobs.nowhere.Job"]),
        ("from torch import nowhere", []),
    ],
)
def test_the_reader_of_imports_sees_what_is_not_there(line: str, wrong: list[str]) -> None:
    assert missing(line) == wrong
