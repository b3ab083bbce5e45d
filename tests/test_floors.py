"""The floors: who may import whom. Read from the source, so nothing needs to be installed or run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("contracts", "planner", "workers", "jobs", "webapp", "tests", "benchmarks")

# package -> top-level modules it must never import
FORBIDDEN: dict[str, set[str]] = {
    "contracts": {*OURS, "django", "torch", "celery", "redis", "pydantic"} - {"contracts"},
    "planner": {*OURS, "django", "torch", "celery", "redis", "numpy"} - {"planner", "contracts"},
    "workers": {"jobs", "webapp", "tests", "benchmarks", "django", "channels", "rest_framework"},
    "jobs": {"workers", "webapp", "tests", "benchmarks", "torch", "numpy"},
    "webapp": {"tests", "benchmarks", "torch", "numpy"},
}
# The supervisor and the host worker stay small: they never load torch.
WITHOUT_TORCH = [
    "workers/supervisor",
    "workers/host.py",
    "workers/app.py",
    "workers/guardian.py",
    "workers/attempts.py",
]


def imported(source: str) -> set[str]:
    """Top-level modules that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_nothing_above_its_floor(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    broken = {str(f.relative_to(ROOT)): imported(f.read_text()) & FORBIDDEN[package] for f in files}
    assert {f: modules for f, modules in broken.items() if modules} == {}


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_what_watches_the_training_never_loads_torch(place: str) -> None:
    path = ROOT / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    assert all("torch" not in imported(f.read_text()) for f in files)


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = "import torch.nn as nn\ndef f():\n    from jobs.models import Job\nfrom . import sibling\n"
    assert imported(source) == {"torch", "jobs"}
