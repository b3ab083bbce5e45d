"""How far off an estimate says that it may be: by its stack, its accelerator and the host that it waits for."""

from __future__ import annotations

import re

import pytest

from planner.cost.estimate import estimate
from planner.cost.learning import format_margin
from planner.facts.presets import PRESETS
from planner.facts.resources import StackName
from planner.facts.spec import Layout
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stack_options import HOST_MARGINS, UNMODELED_BYTES, get_time_margin
from planner.hardware.stacks import STACKS
from tests.planner.hardware.stacked import H100, SPEC, TRAIN, on


def test_an_estimate_tells_its_stack_and_how_far_that_is_off() -> None:
    on_a100s = {"megatron_2021", "deepspeed", "scaling"}
    widest = max(known.time_margin for known in STACKS.values())
    for stack, known in STACKS.items():
        told = estimate(on(stack), H100)["time"]["interval"]
        assert told["share"] == (widest if stack in on_a100s else known.time_margin)
        assert known.title in told["words"]


def test_a_step_that_waits_for_its_host_is_told_less_surely_than_one_that_does_not() -> None:
    shares = {host: get_time_margin("megatron", "H100", host) for host in (0.0, 0.0009, 0.001, 0.19, 0.2, 0.9)}
    known = STACKS["megatron"].time_margin
    assert list(shares.values()) == [known, known, *[HOST_MARGINS[1][1]] * 2, *[HOST_MARGINS[0][1]] * 2]
    train = TRAIN.model_copy(update={"global_batch": 2, "micro_batches": 1, "seq_len": 128})
    small = SPEC.model_copy(update={"model": PRESETS["gpt-tiny"].model, "layout": Layout(), "train": train})
    told = estimate(on("megatron", small), H100)["time"]["interval"]
    assert told["share"] == HOST_MARGINS[0][1]
    assert re.search(r", \d\d% of the step waits for the host, within a factor of 3.3$", told["words"])


def test_a_peak_is_told_with_how_far_it_may_be_off() -> None:
    """By the stack's published peaks, and by what no spec tells, which is much of a small rank's."""
    for stack, known in STACKS.items():
        made = estimate(on(stack), H100)
        told, share = made["memory_interval"], known.memory_margin + UNMODELED_BYTES / made["peak_memory_bytes"]
        assert told["share"] == pytest.approx(share)
        assert (known.title in told["words"], format_margin(share) in told["words"]) == (True, True)
    assert "without a known peak" in estimate(on("fsdp1"), H100)["memory_interval"]["words"]


def test_an_interval_holds_only_for_accelerators_that_it_was_measured_on() -> None:
    """Megatron's on H100 and Blackwell, from 327 published steps; until 2026-11-28 it was told of a V100 as well."""
    widest = max(known.time_margin for known in STACKS.values())
    measured: dict[StackName, set[str]] = {
        "megatron": {"h100", "h200", "b200", "b300", "gb200", "gb300", "h100-500w"},
        "megatron_2021": {"a100-40gb", "a100-80gb"},
        "fsdp2": {"h100", "h200", "h100-500w"},
        "fsdp1": {"a100-40gb", "a100-80gb", "h100", "h100-500w"},
        "deepspeed": {"a100-40gb", "a100-80gb"},
        "scaling": {"a100-40gb", "a100-80gb"},
    }
    for stack, known in measured.items():
        for name, cluster in CLUSTERS.items():
            if cluster.device == "cuda":
                told = estimate(on(stack), cluster)["time"]["interval"]
                assert told["share"] == (STACKS[stack].time_margin if name in known else widest), (stack, name)
                assert ("without a measured step on this device" in told["words"]) == (name not in known)
    assert get_time_margin("megatron", "NVIDIA H100 80GB HBM3", 0.0) == STACKS["megatron"].time_margin
    assert get_time_margin("megatron", "NVIDIA GH200 480GB", 0.0) == widest
