"""A run that is asked to save and stop does so after the same step on all ranks, and the next attempt goes on there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.names import save_key
from tests.support.host import host
from tests.support.processes import RedisServer

TRAIN = {"steps": 100_000, "warmup_steps": 2, "global_batch": 4, "seq_len": 32, "eval_every": 0, "verify": "off"}


def spec(**train: Any) -> dict[str, Any]:
    return {
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2},
        "train": {**TRAIN, "checkpoint_every": 50_000, **train},
    }


@pytest.mark.slow
def test_it_saves_stops_and_goes_on_from_there(redis_service: RedisServer, tmp_path: Path) -> None:
    with host(redis_service, tmp_path) as machine, machine.worker():
        machine.order("gives-way", spec=spec())
        machine.wait_for_steps("gives-way", 3)
        redis_service.client().set(save_key("gives-way", 1), "1")
        report = machine.exit_of("gives-way")
        assert report["outcome"] == "cancelled"
        assert report["summary"] is not None
        stopped = report["summary"]["steps"]
        assert 3 <= stopped < 50_000
        name = f"gives-way/1/step-{stopped:08d}"
        assert report["reason"] == (
            f"stopped after step {stopped} to make room for a job with higher priority; newest checkpoint {name}"
        )
        assert [one["name"] for one in report["summary"]["checkpoints"]] == [name]
        last = dict.fromkeys(range(4), 0)
        for item in machine.items("gives-way", "step"):
            last[item["rank"]] = item["step"]
        assert set(last.values()) == {stopped}, "all ranks ended with the same step"
        machine.order("gives-way", attempt=2, spec=spec(steps=stopped + 2))
        machine.wait_for_steps("gives-way", stopped + 2, attempt=2)
        assert min(item["step"] for item in machine.items("gives-way", "step", 2)) == stopped + 1
