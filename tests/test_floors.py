"""The floors: who may import whom. Read from the source, so nothing needs to be installed or run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("contracts", "planner", "workers", "jobs", "webapp", "tests", "benchmarks")

# package -> top-level modules it must never import
FORBIDDEN: dict[str, set[str]] = {
    "contracts": {*OURS, "django", "torch", "celery", "redis"} - {"contracts"},
    "planner": {*OURS, "django", "torch", "celery", "redis", "numpy"} - {"planner", "contracts"},
    "workers": {"jobs", "webapp", "tests", "benchmarks", "django", "channels", "rest_framework"},
    "jobs": {"workers", "webapp", "tests", "benchmarks", "torch", "numpy"},
    "webapp": {"tests", "benchmarks", "torch", "numpy"},
}
# Rooms of a floor, lowest first: a room imports only from those before it; two in one entry know each other.
ROOMS = {
    "jobs": ["models", "connection", "access", "present", "planning", "queue", "live", "api", "pages", "lab", "admin"],
    # The trainer saves through checkpoint, whose export builds the trainer's model: one room with two doors.
    "workers": ["drafts", "host", "meter", "checkpoint trainer", "tokenizer", "calibrate", "lab", "dry_run"],
}
# What watches the training stays small: it never loads torch, but for the module that starts torchrun.
WITHOUT_TORCH = sorted(path for path in (ROOT / "workers/host").rglob("*.py") if path.name != "launch.py")


def imported(source: str) -> set[str]:
    """Top-level modules that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def rooms_used(file: Path, package: str) -> set[str]:
    """Rooms of its own package that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        parts = node.module.split(".")
        if parts[0] == package:
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_nothing_above_its_floor(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    broken = {str(f.relative_to(ROOT)): imported(f.read_text()) & FORBIDDEN[package] for f in files}
    assert {f: modules for f, modules in broken.items() if modules} == {}


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_nothing_above_it(package: str) -> None:
    level = {room: height for height, entry in enumerate(ROOMS[package]) for room in entry.split()}
    broken = []
    for file in sorted((ROOT / package).rglob("*.py")):
        room = file.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room not in level:
            continue
        above = {other for other in level if level[other] > level[room]}
        broken += [f"{file.relative_to(ROOT)} -> {seen}" for seen in sorted(rooms_used(file, package) & above)]
    assert broken == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_is_on_the_list(package: str) -> None:
    exempt = {"__init__", "apps", "migrations", "management", "templatetags"}
    found = {path.name.removesuffix(".py") for path in (ROOT / package).iterdir() if path.name != "__pycache__"}
    assert found - exempt == {room for entry in ROOMS[package] for room in entry.split()}


@pytest.mark.parametrize("path", WITHOUT_TORCH, ids=lambda path: path.stem)
def test_what_watches_the_training_never_loads_torch(path: Path) -> None:
    assert "torch" not in imported(path.read_text())


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = "import torch.nn as nn\ndef f():\n    from jobs.models import Job\nfrom . import sibling\n"
    assert imported(source) == {"torch", "jobs"}
