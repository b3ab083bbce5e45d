"""`make gpu`: whose results are kept, and what is told of a part that failed before."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import machine
from tests.benchmarks.test_gpu import run, writes


def test_without_git_what_other_sources_showed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where git is not there, or does not trust the folder of another user."""
    source = tmp_path / "workers" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    first = machine.commit()
    assert machine.commit() == first
    source.write_text("2")
    assert machine.commit() != first


def test_a_source_that_git_does_not_know_yet_is_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "a.py").write_text("1")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
    for argv in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run([*git, *argv], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    clean = machine.commit()
    (tmp_path / "workers" / "b.py").write_text("1")
    assert machine.commit().startswith(f"{clean}+")


def test_what_passes_at_a_further_try_says_that_it_failed(tmp_path: Path) -> None:
    run([writes(tmp_path, "shaky", x=3.0)], tmp_path)
    (again,) = run([writes(tmp_path, "shaky", x=1.0)], tmp_path)
    assert again["state"] == "passed"
    assert again["notes"][-1].startswith(f"failed before, on {again['day']}: x: the prediction has an error of ")
    (kept,) = run([writes(tmp_path, "shaky", x=1.0)], tmp_path)
    assert kept["notes"] == again["notes"]
