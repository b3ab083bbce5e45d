"""Overlap of communication with matmuls in Megatron, its limits, and a slow bias kernel."""

from __future__ import annotations

import pytest

from planner.cost.resolved_plan import resolve
from planner.cost.stage_time import Timing, compute_interleaved_exposure
from planner.cost.timing import Timer
from planner.facts.model_parts import MoeSpec
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stacks import STACKS

H100, GB200 = CLUSTERS["h100"], CLUSTERS["gb200"]
MEGATRON = STACKS["megatron"]
PIPED = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=8, pp=4, virtual_stages=2, schedule="interleaved_1f1b", zero=1),
    train=TrainSpec(global_batch=128, micro_batches=16, seq_len=4096, precision="bf16"),
    resources=Resources(device="cuda", stack="megatron"),
)
MIXED = JobSpec(
    model=PRESETS["llama3-8b"].model.model_copy(
        update={"moe": MoeSpec(num_experts=16, experts_per_token=2, expert_ffn_hidden_size=4096)}
    ),
    layout=Layout(dp=16, ep=16, zero=1),
    train=TrainSpec(global_batch=64, micro_batches=4, seq_len=4096, precision="bf16"),
    resources=Resources(device="cuda", stack="megatron"),
)


def _time_step(spec: JobSpec, **changed: object) -> Timing:
    return Timer(GB200, {"megatron": MEGATRON._replace(**changed)}).get_step(spec)


def _with_micro_batches(spec: JobSpec, batches: int) -> JobSpec:
    train = spec.train.model_copy(update={"micro_batches": batches, "global_batch": batches * spec.layout.dp})
    return spec.model_copy(update={"train": train})


def test_interleaved_pipeline_overlaps_sends_except_in_fill_and_drain() -> None:
    """With 4 stages of 2 chunks, 2 x 3 + 4 chunks precede the first backward. It adds one more of 2 x 16."""
    bare, hidden = (_time_step(PIPED, overlaps_sends=hides).exposed_s["pp"] for hides in (False, True))
    assert hidden / bare == pytest.approx((2 * 3 + 4 + 1) / 32)
    twice = _time_step(_with_micro_batches(PIPED, 32)).exposed_s["pp"]
    assert twice == pytest.approx(hidden), "as many fill it however many come"
    few = _with_micro_batches(PIPED, 4)
    assert _time_step(few).exposed_s["pp"] == _time_step(few, overlaps_sends=False).exposed_s["pp"]


def test_pipeline_with_one_chunk_per_stage_exposes_its_sends() -> None:
    layout = PIPED.layout.model_copy(update={"virtual_stages": 1, "schedule": "1f1b"})
    spec = PIPED.model_copy(update={"layout": layout})
    assert _time_step(spec) == _time_step(spec, overlaps_sends=False)


@pytest.mark.parametrize(
    ("seconds", "beside", "own", "shown"),
    [
        (8.0, 8.0, False, 4.0),  # the share of one chunk of two
        (8.0, 1.0, False, 6.0),  # 4 micro-batches of the other chunk leave 2 s
        (8.0, 4.0, True, 2.0),  # half of the 4 s hides the same amount of the first chunk
        (8.0, 8.0, True, 1.0),  # the first of 8 layers stays exposed
        (8.0, 1.0, True, 5.5),
    ],
)
def test_interleaved_chunks_communicate_in_turn(seconds: float, beside: float, own: bool, shown: float) -> None:
    """Plan 4 stages of 2 chunks, with 8 layers per stage."""
    assert compute_interleaved_exposure(resolve(PIPED), seconds, beside, overlaps_own=own) == pytest.approx(shown)


def test_chunk_reductions_overlap_all_remaining_turns() -> None:
    """Sending a stage's parameters takes longer than computing a micro-batch."""
    slow = H100.model_copy(update={"node": H100.node.model_copy(update={"bytes_per_s": 20e9})})
    at_once, in_turn = (
        Timer(slow, {"megatron": MEGATRON._replace(contention=0.0, reduces_by_chunk=turns)})
        .get_step(PIPED)
        .exposed_s["dp"]
        for turns in (False, True)
    )
    assert 0 < in_turn < 0.8 * at_once
    one = PIPED.model_copy(update={"layout": PIPED.layout.model_copy(update={"virtual_stages": 1, "schedule": "1f1b"})})
    assert _time_step(one) == _time_step(one, reduces_by_chunk=False)


def test_expert_traffic_of_first_forward_and_last_backward_stays_exposed() -> None:
    bare = _time_step(MIXED).exposed_s["ep"]
    for batches in (4, 16):
        spec = _with_micro_batches(MIXED, batches)
        shown = _time_step(spec, overlap={"ep": 0.8}).exposed_s["ep"]
        assert shown / (bare * batches / 4) == pytest.approx(1 - 0.8 * (1 - 1 / batches))
