"""Fixtures that every package's tests share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tests.support.early import early_first
from tests.support.postgres import as_default_database, postgres_server
from tests.support.processes import RedisServer, redis_server

# The same cases each time, and as long as each takes: a busy machine fails no test.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=40)
hypothesis.settings.load_profile("suite")

# A suite that a shell began in its background ignores Ctrl-C, and so would all that its tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads that wait for one another in each of several processes took most of two cores: a test of 10 s took 33.
torch.set_num_threads(1)


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A process takes a module at a time; all modules of browser tests go to one, so that one board serves them."""

    def _split_scope(self, nodeid: str) -> str:
        return "board" if nodeid.startswith("tests/e2e/test_") else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModule:
    return ByModule(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = early_first([(item.nodeid, item) for item in items])


def pytest_collection_finish() -> None:
    """What the suite and its imports consist of, 770,000 objects, is not looked through again with each collection of
    garbage, of which a dry run makes many: beside all of it one took one and a half times to twice as long."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor is what each module imported and left, which came to 350,000 more."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def redis_service(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres(transactional_db: None, postgres_url: str) -> Iterator[None]:
    """Django's database is a real PostgreSQL."""
    with as_default_database(postgres_url):
        yield


@pytest.fixture(params=["sqlite", "postgres"])
def each_database(request: pytest.FixtureRequest, transactional_db: None) -> str:
    """Django's database is SQLite, then PostgreSQL; transactions are real."""
    if request.param == "postgres":
        request.getfixturevalue("postgres")
    name: str = request.param
    return name
