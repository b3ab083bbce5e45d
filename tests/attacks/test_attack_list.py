"""Check that docs/explanation/security.md lists a test for every attack, and that the source unpickles nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

NUM_ATTACKS = 33
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CHECKPOINT_READERS = {"FileSystemReader", "FsspecReader"}  # torch's readers, whose read_metadata unpickles
# The first benchmark reads a file that it wrote itself, and the second one only writes.
WRITES = (ROOT / "benchmarks/rivals/__main__.py", ROOT / "benchmarks/public_scripts/stand_ins.py")


def list_attacks() -> set[int]:
    """Return the numbers in the table of attacks."""
    return {int(number) for number in re.findall(r"^\| (\d+) \| .* \| .* \|$", read_security_page(), re.MULTILINE)}


def list_attack_tests() -> list[tuple[int, str]]:
    """Return number and test of each item in the list of tests."""
    found = re.findall(r"^- (\d+): `(tests/\S+)`$", read_security_page(), re.MULTILINE)
    return [(int(number), test) for number, test in found]


def read_security_page() -> str:
    return (ROOT / "docs/explanation/security.md").read_text()


def test_every_attack_has_a_row_and_a_test() -> None:
    assert list_attacks() == set(range(1, NUM_ATTACKS + 1))
    assert {number for number, _ in list_attack_tests()} == list_attacks()


@pytest.mark.parametrize("named", sorted({test for _, test in list_attack_tests()}))
def test_every_listed_test_exists(named: str) -> None:
    path, _, function = named.partition("::")
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


def find_unpickling(source: str) -> Iterator[str]:
    """Yield constructs that could run code from received data."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.partition(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLERS:
                yield module
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in keywords):
                    yield "torch.load"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CHECKPOINT_READERS:
                yield name
            case ast.ClassDef(bases=bases, body=body) if any(ast.unparse(b) in CHECKPOINT_READERS for b in bases):
                if not any(isinstance(one, ast.FunctionDef) and one.name == "read_metadata" for one in body):
                    yield node.name
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"
            case _:
                pass


def test_26_source_unpickles_nothing() -> None:
    """tests/workers/checkpoint/test_damage.py tests the actual read of a checkpoint."""
    folders = ("contracts", "planner", "jobs", "webapp", "workers", "client", "benchmarks")
    files: list[Path] = [path for room in folders for path in (ROOT / room).rglob("*.py") if path not in WRITES]
    assert len(files) > 300
    worth_parsing = re.compile("|".join([*UNPICKLERS, *CHECKPOINT_READERS, r"torch\.load", "allow_pickle"]))
    named = [(path, source) for path in files if worth_parsing.search(source := path.read_text())]
    assert {str(path): found for path, source in named if (found := list(find_unpickling(source)))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(p, weights_only=False)",
        "numpy.load(p, allow_pickle=True)",
        "import cloudpickle.cloudpickle",
        "FileSystemReader(path)",
        "checkpoint.FileSystemReader(path).read_metadata()",
        "class Reader(FileSystemReader):\n    pass",
    ],
)
def test_source_check_finds_each_construct(line: str) -> None:
    assert list(find_unpickling(line)) != []
