"""Record the outcomes of faults for the table of `make faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import told


@pytest.fixture(autouse=True)
def _row(record_property: Callable[[str, object], None]) -> Iterator[None]:
    told.endings.clear()
    yield
    record_property("said", "; ".join(dict.fromkeys(ending.said for ending in told.endings)))
    record_property("left", sum(ending.left for ending in told.endings))
