"""What an attempt found beside its plan: of all its ranks, or of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Host
from jobs.runs.history.queries.results import get_results
from tests.jobs.planning.test_learned import placed

pytestmark = pytest.mark.django_db

ROW = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_count": 5, "measured_count": 5}


@pytest.mark.parametrize(
    ("told", "off"), [({}, None), ({"0": [0]}, None), ({"0": [0], "1": [0]}, 0), ({"0": [3], "1": [4]}, 7)]
)
def test_bytes_off_are_told_once_all_ranks_have_told(
    owner: User, make_host: Callable[..., Host], told: dict[str, Any], off: int | None
) -> None:
    """Of two ranks one alone made it 0 B, and a build that asks for 0 passed."""
    make_host()
    attempt = placed(owner, layout={"dp": 2})
    rows = {
        rank: [{**ROW, "predicted_bytes": 100, "measured_bytes": 100 + more} for more in own]
        for rank, own in told.items()
    }
    attempt.exit = {"summary": {"verdict": rows}}
    attempt.save()
    assert get_results(attempt.job, attempt.number)["off_bytes"] == off
