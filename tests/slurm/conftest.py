"""One Slurm for all tests of a run; each leaves its nodes idle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.slurm.cluster import Cluster, cluster, missing
from tests.slurm.front import Front, front
from tests.slurm.login import Login
from tests.support.board import Board, board
from tests.support.processes import ROOT
from webapp.runner import free_port


@pytest.fixture(scope="session")
def _machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as made:
        yield made


@pytest.fixture
def slurm(_machines: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Idle, and what Slurm's commands of this process talk to."""
    monkeypatch.setenv("SLURM_CONF", str(_machines.conf))
    yield _machines
    _machines.settle()


class Installation(NamedTuple):
    """A board whose jobs run on the cluster, and what stands between the two."""

    board: Board
    front: Front
    folder: Path


@pytest.fixture(scope="session")
def _installed(_machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("board")
    folder = root / "cluster"
    folder.mkdir()
    python = root / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    port = free_port()
    with front(root, _machines.address, port) as made:
        settings = {
            "SLURM_CONF": str(_machines.conf),
            "MESHBOARD_PORT": str(port),
            "MESHBOARD_SLURM_FOLDER": str(folder),
            "MESHBOARD_SLURM_PYTHON": str(python),
            "MESHBOARD_SLURM_BOARD": made.url,
            "MESHBOARD_SLURM_CA_FILE": str(made.certificate),
            "MESHBOARD_ALLOWED_HOSTS": f"127.0.0.1,localhost,{_machines.address}",
        }
        with board(root / "var", **settings) as up:
            yield Installation(up, made, folder)


@pytest.fixture
def installed(slurm: Cluster, _installed: Installation) -> Installation:
    return _installed


@pytest.fixture
def login(slurm: Cluster, tmp_path: Path) -> Iterator[Login]:
    made = Login(slurm, tmp_path)
    made.prepare()
    made.start()
    try:
        yield made
    finally:
        made.stop()
