"""Cluster for each test module, and the outcome of each fault for the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, get_missing_requirement
from tests.support import job_waits
from workers.host.processes import find_processes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as slow. They need root."""
    missing = get_missing_requirement()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:  # a module's own marker comes first
                item.add_marker(pytest.mark.timeout(600))
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"a cluster of network namespaces: {missing}"))


@pytest.fixture(autouse=True)
def _row(record_property: Callable[[str, object], None]) -> Iterator[None]:
    job_waits.endings.clear()
    Cluster.ended.clear()
    yield
    record_property("said", "; ".join(dict.fromkeys(ending.result for ending in job_waits.endings)))
    # After the test, a disconnected host still trains and ends its ranks later.
    record_property("left", sum(len(find_processes(*attempt)) for attempt in Cluster.ended))
