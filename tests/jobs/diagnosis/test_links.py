"""Report the speed of a group's link and its source."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.runs.diagnosis import HostRanks, PlannedRun
from jobs.runs.diagnosis.collective_timing import TransferRoute, TransferStats, get_link_speed, summarize_speeds
from jobs.runs.diagnosis.traced_step import ProcessGroup
from tests.jobs.diagnosis.items import CPU

INSIDE, OUT = CPU.node.bytes_per_s, CPU.network.bytes_per_s


@pytest.mark.parametrize(
    ("hardware", "inside", "across"),
    [
        ({}, "data sheet", "data sheet"),
        ({"link_runs": 2}, "runs", "data sheet"),
        ({"link_runs": 2, "latency_alone": True}, "data sheet", "data sheet"),
        ({"basis": "calibrated"}, "calibrated", "calibrated"),
    ],
)
def test_link_speed_names_its_source(hardware: dict[str, Any], inside: str, across: str) -> None:
    hardware = CPU.model_copy(update=hardware).model_dump(mode="json")
    run = PlannedRun({}, {}, 4, hardware=hardware, members=[HostRanks("a", 0, 2), HostRanks("b", 2, 2)])
    assert get_link_speed(run, [0, 1]) == (INSIDE, inside)
    assert get_link_speed(run, [0, 2]) == (OUT, across)
    way = TransferRoute(ProcessGroup("dp", (0, 1), 0), "all_reduce", (0, 1))
    (group,) = summarize_speeds(run, [{way: TransferStats(1, 2**20, 0.001, 2**20 / 0.001)}])
    assert (group["link_bytes_s"], group["basis"]) == (INSIDE, inside)


def test_unknown_hardware_has_no_link_speed() -> None:
    assert get_link_speed(PlannedRun({}, {}, 2), [0, 1]) == (None, "")
