"""What a group's link is said to do, and by what."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.runs.diagnosis import Member, Run
from jobs.runs.diagnosis.events.links import Moved, Way, link_speed, speeds
from jobs.runs.diagnosis.events.step import Group
from tests.jobs.diagnosis.told import CPU

INSIDE, OUT = CPU.node.bytes_per_s, CPU.network.bytes_per_s


@pytest.mark.parametrize(
    ("told", "inside", "across"),
    [
        ({}, "data sheet", "data sheet"),
        ({"link_runs": 2}, "runs", "data sheet"),
        ({"link_runs": 2, "latency_alone": True}, "data sheet", "data sheet"),
        ({"basis": "calibrated"}, "calibrated", "calibrated"),
    ],
)
def test_a_link_has_the_basis_of_its_own_rate(told: dict[str, Any], inside: str, across: str) -> None:
    hardware = CPU.model_copy(update=told).model_dump(mode="json")
    run = Run({}, {}, 4, hardware=hardware, members=[Member("a", 0, 2), Member("b", 2, 2)])
    assert link_speed(run, [0, 1]) == (INSIDE, inside)
    assert link_speed(run, [0, 2]) == (OUT, across)
    way = Way(Group("dp", (0, 1), 0), "all_reduce", (0, 1))
    (group,) = speeds(run, [{way: Moved(1, 2**20, 0.001, 2**20 / 0.001)}])
    assert (group["link_bytes_s"], group["basis"]) == (INSIDE, inside)


def test_of_hardware_that_nobody_knows_no_link_is_told() -> None:
    assert link_speed(Run({}, {}, 2), [0, 1]) == (None, "")
