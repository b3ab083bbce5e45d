"""Slurm for all tests of a run. Each test leaves its nodes idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.queue.slurm.script import Site
from tests.slurm.accounts import accounts
from tests.slurm.accounts import get_missing_requirement as get_missing_accounts
from tests.slurm.cluster import Cluster, cluster, get_missing_requirement
from tests.slurm.installation import Installation, installation
from tests.slurm.login import Login


@pytest.fixture(scope="session")
def _machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := get_missing_requirement():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as made:
        yield made


@pytest.fixture
def slurm(_machines: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return the idle cluster that Slurm's commands of this process use."""
    monkeypatch.setenv("SLURM_CONF", str(_machines.conf))
    yield _machines
    _machines.settle()


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path, settings: Any) -> Site:
    """Configure a cluster whose supervisors only sleep."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 300\n")
    sleeper.chmod(0o755)
    made = Site(str(tmp_path), str(sleeper), "https://board")
    settings.SLURM = made._asdict()
    return made


@pytest.fixture(scope="module")
def _accounts(_machines: Cluster) -> Iterator[None]:
    if reason := get_missing_accounts():
        pytest.skip(reason)
    with accounts(_machines):
        yield
        _machines.settle()


@pytest.fixture
def accounted(_accounts: None, slurm: Cluster) -> Cluster:
    """Return the cluster with accounts, and a slurmctld that soon forgets ended jobs."""
    return slurm


@pytest.fixture(scope="session")
def _installed(_machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installation(_machines, tmp_path_factory.mktemp("board")) as made:
        yield made


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
