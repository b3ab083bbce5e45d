"""Record the outcomes of faults for the table of `make faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import job_waits


@pytest.fixture(autouse=True)
def _row(record_property: Callable[[str, object], None]) -> Iterator[None]:
    job_waits.endings.clear()
    yield
    record_property("said", "; ".join(dict.fromkeys(ending.result for ending in job_waits.endings)))
    record_property("left", sum(ending.num_processes_left for ending in job_waits.endings))
