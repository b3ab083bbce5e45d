"""The floors: who may import whom. Read from the source, so nothing needs to be installed or run."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from planner.facts.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
OURS = ("contracts", "planner", "workers", "jobs", "webapp", "manual", "tests", "benchmarks")

# package -> top-level modules it must never import
FORBIDDEN: dict[str, set[str]] = {
    "contracts": {*OURS, "django", "torch", "celery", "redis"} - {"contracts"},
    "planner": {*OURS, "django", "torch", "celery", "redis", "numpy"} - {"planner", "contracts"},
    "workers": {"jobs", "webapp", "manual", "tests", "benchmarks", "django", "channels", "rest_framework"},
    "jobs": {"workers", "webapp", "manual", "tests", "benchmarks", "torch", "numpy"},
    "webapp": {"manual", "tests", "benchmarks", "torch", "numpy"},
    "manual": {"tests", "benchmarks", "torch", "numpy"},  # reads all of it, to write the reference
    "client": {*OURS, "django", "torch", "celery", "redis", "pydantic"},  # installed by itself, in seconds
}
# Rooms of a floor, lowest first: a room imports only from those before it; two in one entry know each other.
ROOMS = {
    "planner": ["facts", "hardware", "cost", "search", "explain", "traffic_growth", "report", "__main__"],
    "jobs": ["models", "core", "planning", "people", "queue", "runs", "operations", "api", "pages", "admin"],
    # The trainer saves through checkpoint, whose export builds the trainer's model: one room with two doors.
    "workers": [
        "rank_environment",
        "disk",
        "device",
        "step_sampling",
        "torch_private",
        "host",
        "meter",
        "checkpoint trainer",
        "tokenizer",
        "calibrate",
        "lab",
        "dry_run",
        "external_runs",
        "slurm",
    ],
    "jobs.runs.history": ["store", "recording", "queries", "exports"],
    "jobs.runs.diagnosis": [
        *("planned_run", "findings", "traced_step", "collective_timing", "step_window"),
        *("rank_reports", "failures", "hangs"),
        *("bottlenecks", "diagnosis"),
    ],
    "jobs.api": [
        *(
            "compatibility",
            "problems",
            "held_request_middleware",
            "parsers",
            "parameters",
            "errors",
            "access",
            "views",
            "openapi",
            "plan_views",
            "streams",
        ),
        "history_views host_views job_views notification_views project_views queue_views reporting_views trace_views",
        "urls",
    ],
}
# Where a kind of job is told from another: by looking it up in one of the tables, never by comparing its name.
KIND_TABLES = {"planner/facts/kinds.py", "jobs/core/kinds.py", "workers/host/programs.py"}
OWN_KIND = {"workers/lab/__main__.py"}  # a program that refuses a spec which is not for it
KIND_FLOORS = ("planner", "jobs", "workers", "webapp")
KIND_NAMES: set[object] = set(KINDS)
# What issues collectives knows the facts alone: from a list of collectives "0 B" could not tell that it is wrong. A
# prediction is for what compares it with what was measured; a profile is what a calibration writes.
PREDICTIONS = (
    *("planner.cost", "planner.hardware", "planner.search"),
    *("planner.explain", "planner.traffic_growth", "planner.report"),
)
READS_PREDICTIONS = {
    "workers/trainer/traffic_check.py": ("planner.cost",),
    "workers/dry_run.py": ("planner.cost",),
    "workers/calibrate/": ("planner.hardware.profile",),
}
# What watches the training stays small: it never loads torch, but for what starts torchrun and where its ranks meet.
STARTS_TORCHRUN = {"launch.py"}
WITHOUT_TORCH = sorted(path for path in (ROOT / "workers/host").rglob("*.py") if path.name not in STARTS_TORCHRUN)


@cache
def imports(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a file, wherever in it they stand."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))


def imported(source: str) -> set[str]:
    """Top-level modules that a file imports."""
    found = set()
    for node in imports(source):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def modules_imported(source: str) -> set[str]:
    """Every module that a file names in an import, whole; of `from a import b` both a and a.b, as b may be a module."""
    found = set()
    for node in imports(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def predictions_read(name: str, source: str) -> set[str]:
    """Rooms of predictions that a file of `workers` imports and may not."""
    allowed = tuple(room for owner, rooms in READS_PREDICTIONS.items() if name.startswith(owner) for room in rooms)
    return {
        module for module in modules_imported(source) if _is_in(module, PREDICTIONS) and not _is_in(module, allowed)
    }


def _is_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def rooms_used(file: Path, package: str) -> set[str]:
    """Rooms of its own package, a dotted name, that a file imports from."""
    found, depth = set(), package.count(".") + 1
    for node in imports(file.read_text()):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        parts = node.module.split(".")
        if parts[:depth] == package.split("."):
            found |= {parts[depth]} if len(parts) > depth else {alias.name for alias in node.names}
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
    house, broken = ROOT / package.replace(".", "/"), []
    for file in sorted(house.rglob("*.py")):
        room = file.relative_to(house).parts[0].removesuffix(".py")
        if room not in level:
            continue
        above = {other for other in level if level[other] > level[room]}
        broken += [f"{file.relative_to(ROOT)} -> {seen}" for seen in sorted(rooms_used(file, package) & above)]
    assert broken == []


def test_what_sends_knows_no_prediction() -> None:
    files = sorted((ROOT / "workers").rglob("*.py"))
    found = {name: predictions_read(name, file.read_text()) for file in files if (name := str(file.relative_to(ROOT)))}
    assert {name: modules for name, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("workers/trainer/optimizer.py", "from planner.cost.traffic import step_traffic"),
        ("workers/trainer/optimizer.py", "def f():\n    import planner.cost.traffic as t"),
        ("workers/trainer/optimizer.py", "from planner import cost"),
        ("workers/trainer/traffic_check.py", "from planner.search.layout_search import search"),
        ("workers/calibrate/measurements.py", "from planner.hardware.cluster import Cluster"),
        ("workers/lab/measure.py", "from planner.report import size"),
    ],
)
def test_the_reader_of_predictions_sees_a_wrong_import(name: str, source: str) -> None:
    assert predictions_read(name, source)
    assert not predictions_read("workers/trainer/traffic_check.py", "from planner.cost.traffic import step_traffic")
    assert not predictions_read(name, "from planner.facts.placements import placement")


def modules() -> dict[str, set[str]]:
    """Of every module of ours, by its dotted name, those of ours that it imports: for its types alone too."""
    roots = {ROOT: OURS, ROOT / "client": ("meshboard",)}
    files = {file: root for root, names in roots.items() for name in names for file in (root / name).rglob("*.py")}
    named = {".".join(file.relative_to(root).with_suffix("").parts): file for file, root in files.items()}
    named = {name.removesuffix(".__init__"): file for name, file in named.items()}
    return {name: (modules_imported(file.read_text()) & named.keys()) - {name} for name, file in named.items()}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, from one back to itself; nothing where none do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Nor for its types alone: what knows of each other so is one module, or the type stands in a third."""
    found = modules()
    assert len(found) > 1000
    assert circle(found) == []


def test_the_reader_of_circles_sees_those_of_types() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.one import One\n"
    imports = {
        "a.one": modules_imported("from a.two import Two") & {"a.two"},
        "a.two": modules_imported(typed) & {"a.one"},
    }
    assert set(circle(imports)) == {"a.one", "a.two"}
    assert circle({"a.one": {"a.two"}, "a.two": set()}) == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_is_on_the_list(package: str) -> None:
    exempt = {"__init__", "apps", "migrations", "management", "templatetags"}
    house = ROOT / package.replace(".", "/")
    # A package that moved can leave a folder with compiled files.
    found = {
        path.name.removesuffix(".py") for path in house.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert found - exempt == {room for entry in ROOMS[package] for room in entry.split()}


def kinds_compared(source: str) -> list[str]:
    """Comparisons of something called a kind with the name of a kind of job; of an item of telemetry they are none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        subject = node.subject if isinstance(node, ast.Match) else node
        if not isinstance(node, ast.Compare | ast.Match):
            continue
        words = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
        text = ast.unparse(subject)
        if words & KIND_NAMES and re.search(r"\bkind\b", text) and not re.search(r"\b(item|event)\b", text):
            found.append(text)
    return found


def test_no_kind_of_job_is_compared_outside_the_tables() -> None:
    found = {}
    for file in sorted(file for floor in KIND_FLOORS for file in (ROOT / floor).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if (
            name not in KIND_TABLES | OWN_KIND
            and "/migrations/" not in name
            and (compared := kinds_compared(file.read_text()))
        ):
            found[name] = compared
    names = "|".join(sorted(KIND_NAMES))
    written = re.compile(rf"""kind\W*(===?|!==?|\bin\b).*["'`]({names})["'`]""")
    pages = [*(ROOT / "templates").rglob("*.html"), *(ROOT / "webapp/static/js").rglob("*.js")]
    for file in pages:
        lines = [line for line in file.read_text().splitlines() if written.search(line)]
        if lines:
            found[str(file.relative_to(ROOT))] = lines
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'if spec.kind == "lab": pass',
        'x = job.spec.get("kind") != "calibrate"',
        'y = kind in ("train", "script")',
        'match spec.kind:\n    case "dry_run":\n        pass',
    ],
)
def test_the_reader_of_kinds_sees_every_comparison(source: str) -> None:
    assert kinds_compared(source)
    assert not kinds_compared('item["kind"] == "lab"')
    assert not kinds_compared('action.kind == "F"')


@pytest.mark.parametrize("path", WITHOUT_TORCH, ids=lambda path: path.stem)
def test_what_watches_the_training_never_loads_torch(path: Path) -> None:
    assert "torch" not in imported(path.read_text())


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = "import torch.nn as nn\ndef f():\n    from jobs.models import Job\nfrom . import sibling\n"
    assert imported(source) == {"torch", "jobs"}


TORCH_ROOM = "torch_private"
NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_make"}


def own_names(files: list[Path]) -> set[str]:
    """Names beginning with an underscore that these files define."""
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_torch(source: str, own: set[str]) -> list[str]:
    """Imports of private torch modules and names, and attributes with an underscore that nobody here defines."""
    if "torch" not in imported(source):
        return []
    found, tree = [], ast.parse(source)
    modules = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    others = {name for name in modules if name in sys.stdlib_module_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [ast.unparse(node)] if any(map(is_private, names)) else []
        elif isinstance(node, ast.Import):
            found += [
                a.name for a in node.names if a.name.startswith("torch.") and any(map(is_private, a.name.split(".")))
            ]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in others:
                continue
            above = isinstance(node.value, ast.Call)  # super() and what else gives somebody else's object
            if node.attr not in NAMEDTUPLE and (above or node.attr not in own):
                found.append(ast.unparse(node))
    return found


def test_torch_s_private_api_stays_in_one_room() -> None:
    files = [f for floor in ("workers", "benchmarks") for f in sorted((ROOT / floor).rglob("*.py"))]
    outside = [file for file in files if TORCH_ROOM not in file.relative_to(ROOT).parts]
    own = own_names(outside)
    found = {str(f.relative_to(ROOT)): private_torch(f.read_text(), own) for f in outside}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.distributed.fsdp._fully_shard import FSDPModule",
        "from torch.distributed.distributed_c10d import _world",
        "import torch._dynamo",
        "torch.ops.aten._grouped_mm(x, y)",
        "group._set_group_name(name)",
        "super()._own()",
    ],
)
def test_the_reader_of_torch_s_private_api_sees_every_use(line: str) -> None:
    assert private_torch(f"import torch\n{line}", {"_own"})
    assert not private_torch(f"import json\n{line}".replace("torch", "json"), {"_own"})
    assert not private_torch("import torch\nself._own = torch.nn._own._replace(x=1)\n", {"_own"})
