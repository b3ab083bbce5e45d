"""`meshboard meter` starts the meter with unchanged arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.client.conftest import FakeServer, Ran

Meshboard = Callable[..., Ran]


class Executed(NamedTuple):
    """Program that replaced the command."""

    words: list[str]
    environment: dict[str, str]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Executed]:
    found: list[Executed] = []

    def execute(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert program == words[0]
        found.append(Executed(words, environment))
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execute)
    return found


def program_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / "meshboard-meter"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_meter_passes_arguments_unchanged(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[Executed]
) -> None:
    program = program_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    output = ["--name", "x", "--", "torchrun", "--nproc-per-node", "2", "train.py", "--", "--help"]
    meshboard("meter", *output, at=server)
    ((words, environment),) = executed
    assert (words, environment["MESHBOARD_TOKEN"]) == ([str(program), *output], "t")


@pytest.mark.parametrize("named_by", ["executable", "argv"])
def test_finds_the_meter_next_to_the_command(
    meshboard: Meshboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[Executed], named_by: str
) -> None:
    """The help of the meter needs no board."""
    beside, empty = program_in(tmp_path / "bin"), tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(
        sys, "executable", str((beside if named_by == "executable" else empty / "x").with_name("python"))
    )
    own = beside.with_name("meshboard") if named_by == "argv" else Path("meshboard")
    ran = meshboard("meter", "--help", name=str(own))
    assert (ran.code, [one.words for one in executed]) == (0, [[str(beside), "--help"]]), ran.err


def test_reports_how_to_install_the_meter(
    meshboard: Meshboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[Executed]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ran = meshboard("meter", "--", "torchrun", "train.py", name=str(tmp_path / "meshboard"))
    assert (ran.code, executed) == (2, [])
    assert "pip install 'meshboard[worker]'" in ran.err
