"""Check that each name that tests and benchmarks import exists."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.test_import_layers import PACKAGES, ROOT, list_imports

FILES = sorted(file for floor in ("tests", "benchmarks") for file in (ROOT / floor).rglob("*.py"))


@cache
def list_names(module: str) -> frozenset[str] | None:
    """Return importable names of a module of the project, or None if the module does not exist."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir() and any(path.rglob("*.py")):
        inside = {entry.stem for entry in path.iterdir() if entry.suffix == ".py" or entry.is_dir()}
        own = path / "__init__.py"
        return frozenset(inside | (list_bound_names(ast.parse(own.read_text()).body) if own.exists() else set()))
    file = path.with_suffix(".py")
    return frozenset(list_bound_names(ast.parse(file.read_text()).body)) if file.exists() else None


def list_bound_names(body: list[ast.stmt]) -> set[str]:
    """Return names that these statements bind in their scope, including branches."""
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


def list_missing_imports(source: str) -> list[str]:
    """Return imports of the project that would fail."""
    found = []
    for node in list_imports(source):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in PACKAGES:
            continue
        names = list_names(node.module)
        found += [
            f"{node.module}.{alias.name}" for alias in node.names if names is None or alias.name not in {*names, "*"}
        ]
    return found


def test_imported_names_exist() -> None:
    wrong = {str(file.relative_to(ROOT)): names for file in FILES if (names := list_missing_imports(file.read_text()))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from tests.test_import_layers import list_top_level_imports", []),
        ("from tests.support import processes", []),
        ("from tests.jobs.traces.test_imports import recorded", ["tests.jobs.traces.test_imports.recorded"]),
        ("def f():\n    from jobs.nowhere import Job", ["jobs.nowhere.Job"]),
        ("from torch import nowhere", []),
    ],
)
def test_finds_missing_names(line: str, wrong: list[str]) -> None:
    assert list_missing_imports(line) == wrong
