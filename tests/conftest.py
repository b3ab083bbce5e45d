"""Fixtures and settings of all tests, and the order in which the test modules start."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support.durations import DurationWriter, get_scope, read_durations, sort_longest_first
from tests.support.postgres import postgres_server, use_database
from tests.support.processes import RedisServer, run_redis
from tests.support.reaper import fork_under_reaper

# Use the same examples in each run without a deadline, because the machine may be busy.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=40)
hypothesis.settings.load_profile("suite")

# A suite in a shell's background ignores Ctrl-C, and so would all processes of its tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With more threads in each of several processes, a test of 10 s takes 33 s on two cores.
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Run each module in a single process, and all browser tests in the same process."""
    from xdist.scheduler import LoadScopeScheduling  # `pytest -p no:xdist` also works without it

    class ModuleScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return get_scope(nodeid)

    return ModuleScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.csv after a run that passed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers are descendants of this process
        fork_under_reaper()
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationWriter())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = sort_longest_first(((item.nodeid, item) for item in items), read_durations())


def pytest_collection_finish() -> None:
    """Exempt the 770,000 objects of imports from garbage collection, which makes dry runs up to twice as slow."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt the objects that a module has imported during its tests, too."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def redis_service(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres(transactional_db: None, postgres_url: str) -> Iterator[None]:
    """PostgreSQL as the database of Django."""
    with use_database(postgres_url):
        yield


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.extended), "postgres"])
def each_database(request: pytest.FixtureRequest, transactional_db: None) -> str:
    """PostgreSQL, and in the extended tier SQLite, as the database of Django with real transactions."""
    if request.param == "postgres":
        request.getfixturevalue("postgres")
    name: str = request.param
    return name
