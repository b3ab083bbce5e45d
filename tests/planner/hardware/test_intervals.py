"""Error interval of an estimate: by stack, accelerator and the share of host time."""

from __future__ import annotations

import re

import pytest

from planner.cost.estimate import estimate
from planner.cost.learning import format_margin
from planner.facts.presets import PRESETS
from planner.facts.resources import StackName
from planner.facts.spec import Layout
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stack_options import HOST_MARGINS, UNMEASURED_MARGIN, UNMODELED_BYTES, get_time_margin
from planner.hardware.stacks import STACKS
from tests.planner.hardware.reference_specs import H100, SPEC, TRAIN, with_stack


def test_estimate_reports_its_stack_and_interval() -> None:
    on_a100s = {"megatron_2021", "deepspeed", "scaling"}
    for stack, known in STACKS.items():
        told = estimate(with_stack(stack), H100)["time"]["interval"]
        assert told["share"] == (UNMEASURED_MARGIN if stack in on_a100s else known.time_margin)
        assert known.title in told["words"]


def test_step_with_host_waits_has_a_wider_interval() -> None:
    shares = {host: get_time_margin("megatron", "H100", host) for host in (0.0, 0.0009, 0.001, 0.19, 0.2, 0.9)}
    known = STACKS["megatron"].time_margin
    assert list(shares.values()) == [known, known, *[HOST_MARGINS[1][1]] * 2, *[HOST_MARGINS[0][1]] * 2]
    train = TRAIN.model_copy(update={"global_batch": 2, "micro_batches": 1, "seq_len": 128})
    small = SPEC.model_copy(update={"model": PRESETS["gpt-tiny"].model, "layout": Layout(), "train": train})
    told = estimate(with_stack("megatron", small), H100)["time"]["interval"]
    assert told["share"] == HOST_MARGINS[0][1]
    assert re.search(r", \d\d% of the step waits for the host, within a factor of 3.3$", told["words"])


def test_memory_peak_has_an_interval() -> None:
    """The interval covers published peaks of the stack, and parts outside the spec that matter on a small rank."""
    for stack, known in STACKS.items():
        made = estimate(with_stack(stack), H100)
        told, share = made["memory_interval"], known.memory_margin + UNMODELED_BYTES / made["peak_memory_bytes"]
        assert told["share"] == pytest.approx(share)
        assert (known.title in told["words"], format_margin(share) in told["words"]) == (True, True)
    assert "without a known peak" in estimate(with_stack("fsdp1"), H100)["memory_interval"]["words"]


def test_interval_applies_only_to_measured_accelerators() -> None:
    """Megatron's interval covers H100 and Blackwell, from 327 published steps."""
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
                told = estimate(with_stack(stack), cluster)["time"]["interval"]
                assert told["share"] == (STACKS[stack].time_margin if name in known else UNMEASURED_MARGIN), (
                    stack,
                    name,
                )
                assert ("without a measured step on this device" in told["words"]) == (name not in known)
    assert get_time_margin("megatron", "NVIDIA H100 80GB HBM3", 0.0) == STACKS["megatron"].time_margin
    assert get_time_margin("megatron", "NVIDIA GH200 480GB", 0.0) == UNMEASURED_MARGIN
