"""Compare the traffic of all ranks with the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Host
from jobs.runs.history.queries.results import get_results
from tests.jobs.planning.test_measured_runs import start_run

pytestmark = pytest.mark.django_db

ROW = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_count": 5, "measured_count": 5}


@pytest.mark.parametrize(
    ("reported", "difference"), [({}, None), ({"0": [0]}, None), ({"0": [0], "1": [0]}, 0), ({"0": [3], "1": [4]}, 7)]
)
def test_difference_is_unknown_until_all_ranks_have_reported(
    owner: User, make_host: Callable[..., Host], reported: dict[str, Any], difference: int | None
) -> None:
    """A result with only some ranks must not report a difference of 0 B."""
    make_host()
    attempt = start_run(owner, layout={"dp": 2})
    rows = {
        rank: [{**ROW, "predicted_bytes": 100, "measured_bytes": 100 + more} for more in own]
        for rank, own in reported.items()
    }
    attempt.exit = {"summary": {"verdict": rows}}
    attempt.save()
    assert get_results(attempt.job, attempt.number)["off_bytes"] == difference
