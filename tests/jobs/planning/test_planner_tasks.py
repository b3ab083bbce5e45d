"""Tasks of a planner process, which need no database."""

from __future__ import annotations

import pytest

from jobs.planning.planner_tasks import MAX_STAGES, build_timeline, search_spec
from planner.facts.parse_spec import parse_fields, parse_spec
from planner.facts.spec import Schedule
from planner.hardware.catalog import CLUSTERS
from tests.support.tiers import extend_after

SCHEDULES: list[tuple[Schedule, int]] = [
    ("naive", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pp", extend_after(1, [MAX_STAGES + 1, 2 * MAX_STAGES]))
def test_draws_the_first_stages_of_a_long_pipeline(schedule: Schedule, chunks: int, pp: int) -> None:
    batch = 2 * pp if schedule == "dualpipev" else pp
    layout = {"pp": pp, "schedule": schedule, "virtual_stages": chunks}
    train = {"global_batch": batch, "micro_batches": batch, "seq_len": 128}
    timeline = build_timeline(
        parse_spec({"model": {"preset": "gpt3-175b"}, "layout": layout, "train": train}), CLUSTERS["h100"]
    )
    assert timeline is not None
    assert (timeline["stages"], timeline["whole"]) == (MAX_STAGES, False)
    assert timeline["micro_batches"] <= batch


def test_draws_all_micro_batches_if_there_are_few() -> None:
    layout, train = {"pp": 24, "schedule": "gpipe"}, {"global_batch": 5, "micro_batches": 5, "seq_len": 128}
    timeline = build_timeline(
        parse_spec({"model": {"preset": "gpt3-175b"}, "layout": layout, "train": train}), CLUSTERS["h100"]
    )
    assert timeline is not None
    assert timeline["micro_batches"] == 5


def test_neighbors_respect_the_constraints_of_the_search() -> None:
    """Suggested neighbors respect the memory limit and the fixed fields of the search."""
    train = {"global_batch": 64, "seq_len": 4096, "precision": "bf16"}
    spec = parse_fields({"model": {"preset": "llama3-8b"}, "train": train, "resources": {"device": "cuda"}})
    max_bytes = 24 * 2**30
    request = {"world_size": 16, "fixed": {"zero": 3, "tp": 1}, "max_micro_batch": 1, "max_memory_bytes": max_bytes}
    found = search_spec(spec, CLUSTERS["h100"], {**request, "runnable": True, "limit": 1})
    near = found["neighbours"]
    assert {(n["layout"]["zero"], n["layout"]["tp"]) for n in near} == {(3, 1)}
    assert all((n["memory_bytes"] or 0) <= max_bytes for n in near if n["fits"])
    assert any("of 24.0" in n["reason"] for n in near)
    assert not any(n["change"].startswith("micro-batch") for n in near)
    (best,) = found["best"]
    assert all(
        "fits only within the margin of error" in n["reason"]
        for n in near
        if n["fits"] and (n["step_s"] or 0) < best["step_s"]
    )
