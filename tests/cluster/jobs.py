"""Specs of the jobs that run on the cluster, and checks of a job that succeeded."""

from __future__ import annotations

from typing import Any

TRAIN: dict[str, Any] = {"steps": 12, "warmup_steps": 2, "global_batch": 12, "seq_len": 32, "eval_every": 0}


def training(name: str, layout: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Return a small GPT that verifies its own results."""
    return {"name": name, "model": {"preset": "gpt-tiny"}, "layout": layout, "train": {**TRAIN, **train}}


def endless(name: str, layout: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Return a job that trains until it is stopped."""
    return training(name, layout, **{"steps": 100_000, "global_batch": 4, "verify": "off", **train})


def check_verified(job: dict[str, Any], ranks: int) -> None:
    """Check that all ranks reported, traffic and replicas match, and a single process gives equal results."""
    assert job["status"] == "succeeded", job["history"]
    summary = job["exit"]["summary"]
    assert sorted(summary["verdict"], key=int) == [str(rank) for rank in range(ranks)]
    rows = [row for rank in summary["verdict"].values() for row in rank]
    assert rows
    for row in rows:
        assert row["measured_bytes"] == row["predicted_bytes"], row
        assert row["measured_count"] == row["predicted_count"], row
    proof = summary["proof"]
    assert proof["wrong"] == []
    assert proof["replicas"]["apart"] == 0
    assert proof["one_process"]["state"] == "equal", proof["one_process"]
