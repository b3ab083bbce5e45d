"""Board whose jobs run on a test cluster, behind HTTPS on the cluster's network."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.slurm.cluster import Cluster
from tests.slurm.front import Front, front
from tests.support.board import Board, run_board
from tests.support.processes import ROOT
from webapp.runner import find_free_port


class Installation(NamedTuple):
    """Complete board. The cluster's nodes share `folder` and use `python`."""

    board: Board
    front: Front
    folder: Path
    python: Path


@contextlib.contextmanager
def installation(slurm: Cluster, root: Path) -> Iterator[Installation]:
    """Run a board with all its files below `root`."""
    folder, python, port = root / "cluster", root / "python", find_free_port()
    folder.mkdir()
    # The checkout is not installed, so the nodes' Python must find it.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with front(root, slurm.address, port) as made:
        settings = {
            "SLURM_CONF": str(slurm.conf),
            "MESHBOARD_PORT": str(port),
            "MESHBOARD_SLURM_FOLDER": str(folder),
            "MESHBOARD_SLURM_PYTHON": str(python),
            "MESHBOARD_SLURM_BOARD": made.url,
            "MESHBOARD_SLURM_CA_FILE": str(made.certificate),
            "MESHBOARD_ALLOWED_HOSTS": f"127.0.0.1,localhost,{slurm.address}",
        }
        with run_board(root / "var", 4, **settings) as up:
            yield Installation(up, made, folder, python)
