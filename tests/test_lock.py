"""Check that requirements.lock pins each package of pyproject.toml once per platform."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
LEFT_OUT = {"mlflow-skinny"}  # of the extra that no environment here is made with
ON_DEMAND = {"mlflow"}  # an extra of its own: the one command that imports it says what to install
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read_pins() -> list[Requirement]:
    return [Requirement(line) for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def read_requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *(r for e in extras for r in e)]
    return [Requirement(line) for line in lines]


def is_applicable(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(dict(default_environment()))


@pytest.mark.parametrize("wanted", read_requirements(), ids=lambda wanted: wanted.name)
def test_pins_satisfy_requirements(wanted: Requirement) -> None:
    found = [p for p in read_pins() if canonicalize_name(p.name) == canonicalize_name(wanted.name)]
    assert found, f"{wanted.name} is not in {LOCK.name}; run `make lock`"
    for pin in found:
        version = str(pin.specifier).removeprefix("==")
        assert wanted.specifier.contains(version), f"{pin} is outside {wanted}; run `make lock`"


def test_pins_are_versions_without_paths() -> None:
    assert not re.search(r"https?:|file:|@|--|(^|\s)/", LOCK.read_text())
    for pin in read_pins():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), f"{pin}: a local build would be nobody else's"
    applied = [canonicalize_name(pin.name) for pin in read_pins() if is_applicable(pin)]
    assert len(applied) == len(set(applied))


def test_cpu_build_of_torch_satisfies_its_pin() -> None:
    torch = next(pin for pin in read_pins() if pin.name == "torch")
    assert torch.specifier.contains("2.13.0+cpu")


def test_dependencies_of_installed_packages_are_pinned() -> None:
    """Follow dependencies of installed packages, and check that all are pinned."""
    names = {canonicalize_name(pin.name) for pin in read_pins()}
    here = [
        r
        for r in read_requirements()
        if is_applicable(r) and not (canonicalize_name(r.name) in LEFT_OUT and not needs(r.name))
    ]
    waiting, seen = here, set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        assert key[0] in names, f"{wanted} is not in {LOCK.name}; run `make lock`"
        for line in distribution(wanted.name).requires or []:
            inner = Requirement(line)
            environments = [{**default_environment(), "extra": extra} for extra in ("", *wanted.extras)]
            if inner.marker is None or any(inner.marker.evaluate(dict(e)) for e in environments):
                waiting.append(inner)


def test_installation_commands_use_the_lock() -> None:
    """Check that Makefile, Dockerfile, and docs install with the lock."""
    for name in ("Makefile", "Dockerfile"):
        for line in (ROOT / name).read_text().splitlines():
            if "pip install" in line or "$(INSTALL)" in line:
                assert "-c requirements.lock" in line or "-c $(LOCK)" in line or "$(INSTALL)" in line, f"{name}: {line}"


@pytest.mark.parametrize(("room", "extras"), [("workers", ["worker"]), ("jobs", ["web"]), ("webapp", ["web", "local"])])
def test_extras_cover_imports_of_their_packages(room: str, extras: list[str]) -> None:
    """Check each extra alone, because an image has only one."""
    lines = [
        *PROJECT["project"]["dependencies"],
        *(r for e in extras for r in PROJECT["project"]["optional-dependencies"][e]),
    ]
    asked_for = {canonicalize_name(Requirement(line).name) for line in lines}
    brought = asked_for | {canonicalize_name(Requirement(line).name) for name in asked_for for line in needs(name)}
    owners = packages_distributions()
    text = "\n".join(f.read_text() for f in (ROOT / room).rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    imported -= ON_DEMAND
    missing = [m for m in sorted(imported) if m in owners and not {canonicalize_name(o) for o in owners[m]} & brought]
    assert [m for m in missing if not (ROOT / m).exists()] == []


def needs(name: str) -> list[str]:
    try:
        return [line for line in distribution(name).requires or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return []


def test_no_package_archive_is_in_git() -> None:
    known = subprocess.check_output(["git", "ls-files", "*.whl", "*.egg", "*.tar.gz"], cwd=ROOT, text=True)
    assert known.split() == []
