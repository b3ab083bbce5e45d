"""What a supervised run tells of itself while it runs, up to a rank that is stopped: as it lies in Redis."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import Host, host
from tests.support.processes import RedisServer, wait_until

JOB = "telling"


@pytest.fixture
def machine(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with host(redis_service, tmp_path) as made:
        yield made


def rank_pid(machine: Host, rank: int) -> int:
    for pid in machine.processes(JOB):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process of rank {rank}")


def test_a_run_tells_its_start_its_steps_and_where_it_stands(machine: Host) -> None:
    def last(kind: str, rank: int) -> Any:
        return next((item for item in reversed(machine.items(JOB, kind)) if item["rank"] == rank), None)

    with machine.worker():
        machine.order(JOB)
        machine.wait_for_steps(JOB, 5)
        wait_until(lambda: last("timeline", 1), "a step is told event by event")
        stopped = rank_pid(machine, 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            seen = wait_until(
                lambda: (
                    (process := last("process", 1))
                    and process["state"] == "stopped"
                    and process["stack"]
                    and last("standing", 0)
                ),
                "the stopped rank and who waits for it are told",
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: last("standing", 0)["still"] == 0, "that it moves again is told")
        machine.server.client().set(f"meshboard:cancel:{JOB}:1", 1)
        machine.exit_of(JOB)
        stood = [item for item in machine.items(JOB, "process") if item["rank"] == 1 and item["state"] == "stopped"]
        assert any(line.endswith("in train") for item in stood for line in item["stack"]), (
            "read from outside, in its sandbox"
        )
        (waits,) = [one for one in seen["groups"] if one.get("blocking")]
        assert waits["issued"] == waits["ended"] + 1
        assert waits["group"]["ranks"] == [0, 1]
        assert any(line.endswith("in train") for line in seen["stack"])

        stages = [
            (item["rank"], item["stage"]) for item in sorted(machine.items(JOB, "start"), key=lambda i: i["time"])
        ]
        assert stages[:2] == [(-1, "claimed"), (-1, "spawned")]
        for rank in (0, 1):
            assert [stage for told, stage in stages if told == rank] == ["imported", "met", "built", "first step"]
        whole: dict[int, set[int]] = {}
        for item in machine.items(JOB, "timeline"):
            whole.setdefault(item["step"], set()).add(item["rank"])
        half = sorted(step for step, ranks in whole.items() if ranks != {0, 1})
        assert half == sorted(whole)[len(whole) - len(half) :], "only of the last did the end cut one rank off"
        assert len(half) < len(whole) / 2
        assert set(last("timeline", 0)["spans"]["work"]) >= {"data", "forward", "backward", "optimizer"}
        steps = [item for item in machine.items(JOB, "step") if item["rank"] == 0]
        assert all(sum(item["parts"]["exposed"].values()) + item["parts"]["data"] <= item["step_s"] for item in steps)
        hidden = [item for item in steps if "dp" not in item["parts"]["exposed"]]  # over before it was waited for
        assert all(item["parts"]["hidden"]["dp"] > 0 for item in hidden)
        assert len(hidden) < len(steps) / 2
        assert last("gauge", -1)["cpu"] >= 0
        assert last("gauge", 0)["resident_bytes"] > 0
