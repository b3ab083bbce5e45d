"""Check the layers of imports and the lists of modules in the source, without running it."""

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
PACKAGES = ("contracts", "planner", "workers", "jobs", "webapp", "manual", "tests", "benchmarks")

# package -> top-level modules that it must never import
FORBIDDEN: dict[str, set[str]] = {
    "contracts": {*PACKAGES, "django", "torch", "celery", "redis"} - {"contracts"},
    "planner": {*PACKAGES, "django", "torch", "celery", "redis", "numpy"} - {"planner", "contracts"},
    "workers": {"jobs", "webapp", "manual", "tests", "benchmarks", "django", "channels", "rest_framework"},
    "jobs": {"workers", "webapp", "manual", "tests", "benchmarks", "torch", "numpy"},
    "webapp": {"manual", "tests", "benchmarks", "torch", "numpy"},
    "manual": {"tests", "benchmarks", "torch", "numpy"},  # imports all packages, because it writes the reference
    "client": {*PACKAGES, "django", "torch", "celery", "redis", "pydantic"},  # is installed separately, in seconds
}
# Packages of a layer, lowest first. A package imports only packages before it. Two in one entry import each other.
LAYERS = {
    "planner": ["facts", "hardware", "cost", "search", "explain", "traffic_growth", "report", "__main__"],
    "jobs": ["models", "core", "planning", "people", "queue", "runs", "operations", "api", "pages", "admin"],
    # The trainer saves with checkpoint, whose export builds the trainer's model. Both form one unit.
    "workers": [
        "rank_environment",
        "disk",
        "device",
        "step_sampling",
        "metric_values",
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
        *("rank_reports", "out_of_memory", "failures"),
        *("deadlocks", "rank_activity", "hang_texts", "hangs", "last_state"),
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
        "history_views host_views job_views notification_views project_views queue_views reporting_views trace_views "
        "upload_views",
        "urls",
    ],
}
# Modules that may compare the name of a job's kind. All other code looks the kind up in a table.
KIND_TABLES = {"planner/facts/kinds.py", "jobs/core/kinds.py", "workers/host/programs.py"}
OWN_KIND = {"workers/lab/__main__.py"}  # a program that rejects specs of other kinds
KIND_FLOORS = ("planner", "jobs", "workers", "webapp")
KIND_NAMES: set[object] = set(KINDS)
# Modules that issue collectives import facts only. With a list of predicted collectives, the check "0 B difference"
# would be meaningless. Only comparison modules import predictions, and a calibration writes a profile.
PREDICTIONS = (
    *("planner.cost", "planner.hardware", "planner.search"),
    *("planner.explain", "planner.traffic_growth", "planner.report"),
)
READS_PREDICTIONS = {
    "workers/trainer/traffic_check.py": ("planner.cost",),
    "workers/dry_run.py": ("planner.cost",),
    "workers/calibrate/": ("planner.hardware.profile",),
}
# Modules on the host stay small. They never load torch, except the launcher of torchrun and the rendezvous store.
STARTS_TORCHRUN = {"launch.py"}
WITHOUT_TORCH = sorted(path for path in (ROOT / "workers/host").rglob("*.py") if path.name not in STARTS_TORCHRUN)


@cache
def list_imports(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return all import statements of a file."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))


def list_top_level_imports(source: str) -> set[str]:
    """Return the top-level modules that a file imports."""
    found = set()
    for node in list_imports(source):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def list_imported_modules(source: str) -> set[str]:
    """Return all modules in imports of a file. `from a import b` has both a and a.b."""
    found = set()
    for node in list_imports(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def list_prediction_imports(name: str, source: str) -> set[str]:
    """Return packages of predictions that a file of `workers` imports without permission."""
    allowed = tuple(room for owner, rooms in READS_PREDICTIONS.items() if name.startswith(owner) for room in rooms)
    return {
        module
        for module in list_imported_modules(source)
        if _is_in_package(module, PREDICTIONS) and not _is_in_package(module, allowed)
    }


def _is_in_package(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def list_used_packages(file: Path, package: str) -> set[str]:
    """Return the packages inside `package` that a file imports."""
    found, depth = set(), package.count(".") + 1
    for node in list_imports(file.read_text()):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        parts = node.module.split(".")
        if parts[:depth] == package.split("."):
            found |= {parts[depth]} if len(parts) > depth else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_only_lower_layers(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    broken = {str(f.relative_to(ROOT)): list_top_level_imports(f.read_text()) & FORBIDDEN[package] for f in files}
    assert {f: modules for f, modules in broken.items() if modules} == {}


@pytest.mark.parametrize("package", LAYERS)
def test_subpackages_import_only_lower_layers(package: str) -> None:
    level = {room: height for height, entry in enumerate(LAYERS[package]) for room in entry.split()}
    house, broken = ROOT / package.replace(".", "/"), []
    for file in sorted(house.rglob("*.py")):
        room = file.relative_to(house).parts[0].removesuffix(".py")
        if room not in level:
            continue
        above = {other for other in level if level[other] > level[room]}
        broken += [f"{file.relative_to(ROOT)} -> {seen}" for seen in sorted(list_used_packages(file, package) & above)]
    assert broken == []


def test_measurement_imports_no_predictions() -> None:
    files = sorted((ROOT / "workers").rglob("*.py"))
    found = {
        name: list_prediction_imports(name, file.read_text()) for file in files if (name := str(file.relative_to(ROOT)))
    }
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
def test_finds_imports_of_predictions(name: str, source: str) -> None:
    assert list_prediction_imports(name, source)
    assert not list_prediction_imports(
        "workers/trainer/traffic_check.py", "from planner.cost.traffic import step_traffic"
    )
    assert not list_prediction_imports(name, "from planner.facts.placements import placement")


def build_import_graph() -> dict[str, set[str]]:
    """Return the imports between modules of the project by module, including imports for types."""
    roots = {ROOT: PACKAGES, ROOT / "client": ("meshboard",)}
    files = {file: root for root, names in roots.items() for name in names for file in (root / name).rglob("*.py")}
    named = {".".join(file.relative_to(root).with_suffix("").parts): file for file, root in files.items()}
    named = {name.removesuffix(".__init__"): file for name, file in named.items()}
    return {name: (list_imported_modules(file.read_text()) & named.keys()) - {name} for name, file in named.items()}


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return a cycle of modules that import each other, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_have_no_cycles() -> None:
    """Include imports for types. Such modules are merged, or the type moves to a third."""
    found = build_import_graph()
    assert len(found) > 1000
    assert find_cycle(found) == []


def test_finds_cycles_of_type_imports() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.one import One\n"
    imports = {
        "a.one": list_imported_modules("from a.two import Two") & {"a.two"},
        "a.two": list_imported_modules(typed) & {"a.one"},
    }
    assert set(find_cycle(imports)) == {"a.one", "a.two"}
    assert find_cycle({"a.one": {"a.two"}, "a.two": set()}) == []


@pytest.mark.parametrize("package", LAYERS)
def test_layers_list_each_subpackage(package: str) -> None:
    exempt = {"__init__", "apps", "migrations", "management", "templatetags"}
    house = ROOT / package.replace(".", "/")
    # A package that moved can leave a folder with compiled files.
    found = {
        path.name.removesuffix(".py") for path in house.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert found - exempt == {room for entry in LAYERS[package] for room in entry.split()}


def list_kind_comparisons(source: str) -> list[str]:
    """Return comparisons of a kind with the name of a kind of job. Those of telemetry items do not count."""
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


def test_only_tables_compare_kinds_of_jobs() -> None:
    found = {}
    for file in sorted(file for floor in KIND_FLOORS for file in (ROOT / floor).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if (
            name not in KIND_TABLES | OWN_KIND
            and "/migrations/" not in name
            and (compared := list_kind_comparisons(file.read_text()))
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
def test_finds_comparisons_of_kinds(source: str) -> None:
    assert list_kind_comparisons(source)
    assert not list_kind_comparisons('item["kind"] == "lab"')
    assert not list_kind_comparisons('action.kind == "F"')


@pytest.mark.parametrize("path", WITHOUT_TORCH, ids=lambda path: path.stem)
def test_host_modules_do_not_import_torch(path: Path) -> None:
    assert "torch" not in list_top_level_imports(path.read_text())


def test_finds_all_kinds_of_imports() -> None:
    source = "import torch.nn as nn\ndef f():\n    from jobs.models import Job\nfrom . import sibling\n"
    assert list_top_level_imports(source) == {"torch", "jobs"}


TORCH_PRIVATE_PACKAGE = "torch_private"
NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_make"}


def list_private_names(files: list[Path]) -> set[str]:
    """Return names with an underscore that these files define."""
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def list_private_torch_uses(source: str, own: set[str]) -> list[str]:
    """Return imports of private torch names, and attributes with an underscore that no file here defines."""
    if "torch" not in list_top_level_imports(source):
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
            above = isinstance(node.value, ast.Call)  # super() and calls that return an object of another class
            if node.attr not in NAMEDTUPLE and (above or node.attr not in own):
                found.append(ast.unparse(node))
    return found


def test_only_torch_private_uses_private_torch_names() -> None:
    files = [f for floor in ("workers", "benchmarks") for f in sorted((ROOT / floor).rglob("*.py"))]
    outside = [file for file in files if TORCH_PRIVATE_PACKAGE not in file.relative_to(ROOT).parts]
    own = list_private_names(outside)
    found = {str(f.relative_to(ROOT)): list_private_torch_uses(f.read_text(), own) for f in outside}
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
def test_finds_uses_of_private_torch_names(line: str) -> None:
    assert list_private_torch_uses(f"import torch\n{line}", {"_own"})
    assert not list_private_torch_uses(f"import json\n{line}".replace("torch", "json"), {"_own"})
    assert not list_private_torch_uses("import torch\nself._own = torch.nn._own._replace(x=1)\n", {"_own"})
