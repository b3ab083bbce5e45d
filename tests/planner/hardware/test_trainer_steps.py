"""Plans of Meshboard's trainer on GPUs match measured steps (docs/reference/gpu.md).

A CPU is planned as eager FSDP2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from planner.cost.timing import Timer, get_step_timing
from planner.facts.parse_spec import parse_spec
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec
from planner.facts.stages import count_tensors
from planner.hardware.catalog import CLUSTERS
from planner.hardware.kernels import FlashAttention, Kernel, build_layer_kernels
from planner.hardware.stacks import OURS_ON_CPU, STACKS, TENSOR_S
from tests.planner.hardware.reference_specs import H100, SPEC, TRAIN, with_stack

GPT2_XL = ({"preset": "gpt2-xl"}, 8, 1024)  # model, and the tokens of each of 4 micro-batches
LLAMA = ({"preset": "llama3-8b", "num_layers": 22}, 1, 4096)
LLAMA_8B = ({"preset": "llama3-8b"}, 2, 4096)


SMALL_MIXTURE = (
    {
        "preset": "llama-mini",
        "moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 256},
    },
    4,
    256,
)


class Step(NamedTuple):
    """Measured step of one rank: median of five. The step of a mixture of experts is a job's mean of three."""

    cluster: str
    model: tuple[dict[str, Any], int, int]
    precision: str
    compiled: bool
    seconds: float
    micro_batches: int = 4
    within: float = 0.04


MEASURED = [  # measured with ten kernels per tensor norm
    Step("h100", GPT2_XL, "bf16", False, 0.9687),
    Step("h100", GPT2_XL, "bf16", True, 0.9933),
    Step("h200", GPT2_XL, "bf16", False, 0.9226),
    Step("h200", GPT2_XL, "bf16", True, 0.9170),
    Step("h200", GPT2_XL, "bf16_state", False, 0.9032),
    Step("h200", LLAMA, "bf16", False, 1.104),
    Step("h200", LLAMA, "bf16", True, 1.088),
    Step("h200", LLAMA_8B, "bf16_state", False, 2.737),
    Step("h200", LLAMA_8B, "bf16_state", True, 2.691),
    Step("h200", LLAMA, "fp8", True, 0.8944),
    Step("h200", SMALL_MIXTURE, "bf16", False, 0.0981, micro_batches=1),
]
SINCE = [  # measured on another H200; the 16-bit rows were predicted before
    Step("h200", GPT2_XL, "bf16", False, 0.8853),
    Step("h200", GPT2_XL, "bf16", True, 0.8533),
    Step("h200", GPT2_XL, "bf16_state", False, 0.8570),
    Step("h200", GPT2_XL, "bf16_state", True, 0.8272),
    Step("h200", LLAMA, "bf16", False, 1.1134),
    Step("h200", LLAMA, "bf16", True, 1.1036),
    Step("h200", LLAMA_8B, "bf16_state", False, 2.786, within=0.06),
    Step("h200", LLAMA_8B, "bf16_state", True, 2.748, within=0.06),
    Step("h200", GPT2_XL, "fp8", False, 1.5062, within=0.02),
    Step("h200", LLAMA, "fp8", False, 1.4701, within=0.02),
]


def build_spec(step: Step, device: str = "cuda", **resources: str) -> JobSpec:
    model, sequences, seq_len = step.model
    train = {
        "precision": step.precision,
        "compile": step.compiled,
        "global_batch": step.micro_batches * sequences,
        "micro_batches": step.micro_batches,
        "seq_len": seq_len,
    }
    return parse_spec({"model": model, "layout": {}, "train": train, "resources": {"device": device, **resources}})


@pytest.mark.parametrize("step", MEASURED, ids=str)
def test_predicted_steps_match_measured_gpu_steps(step: Step) -> None:
    as_it_was = {**STACKS, "ours": STACKS["ours"]._replace(tensor_s=TENSOR_S)}
    told = Timer(CLUSTERS[step.cluster], as_it_was).get_step(build_spec(step)).step_s
    assert told == pytest.approx(step.seconds, rel=step.within)


@pytest.mark.parametrize("step", SINCE, ids=str)
def test_predicted_steps_match_later_gpu_steps(step: Step) -> None:
    told = Timer(CLUSTERS[step.cluster], STACKS).get_step(build_spec(step)).step_s
    assert told == pytest.approx(step.seconds, rel=step.within)


def test_compilation_changes_only_stacks_with_constants_for_it() -> None:
    eager, compiled = (build_spec(Step("h100", GPT2_XL, "fp8", does, 0.0)) for does in (False, True))
    assert get_step_timing(compiled, CLUSTERS["h100"]).step_s < 0.7 * get_step_timing(eager, CLUSTERS["h100"]).step_s
    for stack in STACKS.keys() - {"ours", "unknown"}:
        assert not STACKS[stack].compiled
        both = [build_spec(Step("h100", GPT2_XL, "fp8", does, 0.0), stack=stack) for does in (False, True)]
        assert len({get_step_timing(spec, CLUSTERS["h100"]).step_s for spec in both}) == 1


def test_cpu_plan_ignores_gpu_constants() -> None:
    cpu, told = CLUSTERS["cpu"], []
    for compiled in (False, True):
        spec = build_spec(Step("cpu", GPT2_XL, "bf16", compiled, 0.0), device="cpu")
        told += [Timer(cpu).get_step(spec).step_s, Timer(cpu, {**STACKS, "ours": OURS_ON_CPU}).get_step(spec).step_s]
    assert len(set(told)) == 1
    assert OURS_ON_CPU.title == STACKS["ours"].title


def test_host_time_before_the_update_counts_each_tensor() -> None:
    spec = build_spec(MEASURED[0])
    none, some = ({**STACKS, "ours": STACKS["ours"]._replace(tensor_s=seconds)} for seconds in (0.0, 1e-4))
    waits = [Timer(CLUSTERS["h100"], stacks).get_step(spec).optimizer_s for stacks in (none, some)]
    tensors = 48 * 16 + 4  # tensors of a layer, the token and position tables, and two of the last norm
    assert count_tensors(spec, 0) == tensors
    assert waits[1] - waits[0] == pytest.approx(tensors * 1e-4)


@pytest.mark.parametrize("cp", [1, 4])
def test_attention_within_documents_computes_masked_scores(cp: int) -> None:
    """Count a rank's own keys, half of them masked by order. Additive masks are written and read."""

    def build_document_spec(document_end: int | None, stack: StackName = "ours") -> JobSpec:
        train = TRAIN.model_copy(update={"document_end": document_end})
        layout = SPEC.layout.model_copy(update={"cp": cp, "dp": 32 // cp})
        return with_stack(stack, SPEC.model_copy(update={"train": train, "layout": layout}))

    for way in (0, 1):
        whole, within = (_flops(build_layer_kernels(build_document_spec(end)).attention)[way] for end in (None, 0))
        assert within == pytest.approx(whole * (1 + 1 / cp))
    timer = Timer(H100)
    assert timer.get_step(build_document_spec(0)).step_s > timer.get_step(build_document_spec(None)).step_s
    assert (
        timer.get_step(build_document_spec(0, "megatron")).step_s
        == timer.get_step(build_document_spec(None, "megatron")).step_s
    )


def _flops(kernels: tuple[Kernel, ...]) -> list[int]:
    return [kernel.flops for kernel in kernels if isinstance(kernel, FlashAttention)]
