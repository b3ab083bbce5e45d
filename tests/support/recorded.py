"""A real run of two ranks, as torch's own tools left it: a fixture for whoever imports it into their conftest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import patient
from tests.support.processes import ROOT, base_environment
from webapp.runner import find_free_port


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch leaves of a real run of two ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    environment = {**base_environment(), "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    command = [sys.executable, "-m", "tests.jobs.traces.recorded_ranks", str(folder)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=ROOT, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=patient(240))
            assert rank.returncode == 0, said.decode()
    finally:
        for rank in ranks:
            rank.kill()
    return folder
