"""What a planner process makes of a spec, without a database."""

from __future__ import annotations

import pytest

from jobs.planning.planner_tasks import MAX_STAGES, build_timeline, search_spec
from planner.facts.parse_spec import parse_fields, parse_spec
from planner.facts.spec import Schedule
from planner.hardware.catalog import CLUSTERS

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
@pytest.mark.parametrize("pp", [MAX_STAGES + 1, 2 * MAX_STAGES])
def test_the_first_stages_of_a_long_pipe_are_drawn_whatever_its_schedule(
    schedule: Schedule, chunks: int, pp: int
) -> None:
    batch = 2 * pp if schedule == "dualpipev" else pp
    layout = {"pp": pp, "schedule": schedule, "virtual_stages": chunks}
    train = {"global_batch": batch, "micro_batches": batch, "seq_len": 128}
    drawn = build_timeline(
        parse_spec({"model": {"preset": "gpt3-175b"}, "layout": layout, "train": train}), CLUSTERS["h100"]
    )
    assert drawn is not None
    assert (drawn["stages"], drawn["whole"]) == (MAX_STAGES, False)
    assert drawn["micro_batches"] <= batch


def test_a_long_pipe_of_few_micro_batches_is_drawn_with_all_of_them() -> None:
    layout, train = {"pp": 24, "schedule": "gpipe"}, {"global_batch": 5, "micro_batches": 5, "seq_len": 128}
    drawn = build_timeline(
        parse_spec({"model": {"preset": "gpt3-175b"}, "layout": layout, "train": train}), CLUSTERS["h100"]
    )
    assert drawn is not None
    assert drawn["micro_batches"] == 5


def test_no_neighbour_is_offered_that_what_was_asked_of_the_search_forbids() -> None:
    """Faster ones that took more memory than was asked for were said to fit."""
    train = {"global_batch": 64, "seq_len": 4096, "precision": "bf16"}
    spec = parse_fields({"model": {"preset": "llama3-8b"}, "train": train, "resources": {"device": "cuda"}})
    room = 24 * 2**30
    asked = {"world_size": 16, "fixed": {"zero": 3, "tp": 1}, "max_micro_batch": 1, "max_memory_bytes": room}
    found = search_spec(spec, CLUSTERS["h100"], {**asked, "runnable": True, "limit": 1})
    near = found["neighbours"]
    assert {(n["layout"]["zero"], n["layout"]["tp"]) for n in near} == {(3, 1)}
    assert all((n["memory_bytes"] or 0) <= room for n in near if n["fits"])
    assert any("of 24.0" in n["reason"] for n in near)
    assert not any(n["change"].startswith("micro-batch") for n in near)
    (best,) = found["best"]
    assert all(
        "fits only within the margin of error" in n["reason"]
        for n in near
        if n["fits"] and (n["step_s"] or 0) < best["step_s"]
    )
