"""Memory of LoRA, quantized weights, other optimizers, and offload, compared with published peaks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from planner.cost.estimate import estimate, parse_plannable
from planner.cost.memory import find_peak, get_host_bytes, get_stage_memory
from planner.cost.memory.options import OptionsMemory
from planner.cost.memory.tape import GRADIENTS, OPTIMIZER, PARAMETERS
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS

GIB = 2**30


def build_spec(preset: str, memory: dict[str, Any] | None, **changes: Any) -> JobSpec:
    layout, train = changes.get("layout", {}), changes.get("train", {})
    ranks = layout.get("dp", 1)
    return parse_plannable(
        {
            "model": {"preset": preset},
            "layout": layout,
            "train": {"global_batch": 2 * ranks, "seq_len": 2048, "precision": "bf16_state", **train},
            "resources": {"device": "cuda", "stack": "unknown"},
            "memory": memory,
        }
    )


def get_bytes(spec: JobSpec) -> int:
    return sum(find_peak(spec, 0).levels)


class PublishedPeak(NamedTuple):
    """Peak of allocated memory from torchtune's README: batch 2 per GPU, packed sequences, torch.compile."""

    preset: str
    seq_len: int
    recompute: str
    memory: dict[str, Any]
    peak_gib: float
    ranks: int = 1


# torch.compile keeps the logits of the 8B, 70B and 405B runs in fewer copies, as a chunked loss does.
CHUNKED = {"chunked_loss": True}
LORA, QLORA = {"lora_rank": 8, **CHUNKED}, {"lora_rank": 8, "frozen_weights": "nf4", **CHUNKED}
IN_BACKWARD = {"optimizer_in_backward": True, **CHUNKED}
OFFLOADED = {"offload_activations": True, **IN_BACKWARD}
STAGED_OUT = {"offload_activations": True, "lora_rank": 64, **CHUNKED}
PUBLISHED = {
    "3B, chunked loss": PublishedPeak("llama3-3b", 4096, "none", CHUNKED, 42.9),
    "3B, checkpointing": PublishedPeak("llama3-3b", 4096, "full", CHUNKED, 24.9),
    "3B, optimizer in backward": PublishedPeak("llama3-3b", 4096, "full", IN_BACKWARD, 23.1),
    "3B, activation offload": PublishedPeak("llama3-3b", 4096, "full", OFFLOADED, 21.8),
    "3B, 8-bit AdamW": PublishedPeak("llama3-3b", 4096, "full", {"optimizer": "adamw_8bit", **OFFLOADED}, 17.6),
    "3B, LoRA": PublishedPeak("llama3-3b", 4096, "full", STAGED_OUT, 8.5),
    "3B, QLoRA": PublishedPeak("llama3-3b", 4096, "full", {"frozen_weights": "nf4", **STAGED_OUT}, 4.6),
    "8B, paged AdamW": PublishedPeak("llama3-8b", 2048, "full", {"optimizer": "paged_adamw_8bit", **IN_BACKWARD}, 18.9),
    "8B, 8-bit AdamW": PublishedPeak("llama3-8b", 2048, "full", {"optimizer": "adamw_8bit", **IN_BACKWARD}, 37.4),
    "8B, LoRA, checkpointing": PublishedPeak("llama3-8b", 2048, "full", LORA, 16.2),
    "8B, LoRA": PublishedPeak("llama3-8b", 2048, "none", LORA, 30.3),
    "8B, QLoRA": PublishedPeak("llama3-8b", 2048, "full", QLORA, 7.4),
    "70B, CPU offload": PublishedPeak(
        "llama3-70b", 2048, "full", {"offload": "optimizer_and_parameters", **CHUNKED}, 13.9, 8
    ),
    "70B, LoRA": PublishedPeak("llama3-70b", 2048, "full", {**LORA, "lora_rank": 16}, 27.6, 8),
    "405B, QLoRA": PublishedPeak("llama3-405b", 2048, "full", {**QLORA, "lora_rank": 16}, 44.8e9 / GIB, 8),
}


def compute_share(one: PublishedPeak) -> float:
    """Return the predicted bytes of tensors over the published peak."""
    layout = {"recompute": one.recompute, **({"dp": one.ranks, "zero": 3} if one.ranks > 1 else {})}
    spec = build_spec(one.preset, one.memory, layout=layout, train={"seq_len": one.seq_len})
    return get_bytes(spec) / GIB / one.peak_gib


@pytest.mark.parametrize("name", PUBLISHED)
def test_peak_is_near_the_published_one(name: str) -> None:
    assert 0.75 <= compute_share(PUBLISHED[name]) <= 1.25


def test_mean_error_of_published_peaks() -> None:
    assert sum(abs(compute_share(one) - 1) for one in PUBLISHED.values()) / len(PUBLISHED) < 0.1


@pytest.mark.parametrize(("targets", "adapters"), [("all_linear", 20_971_520), ("attention", 6_815_744)])
def test_lora_trains_as_many_parameters_as_peft_reports(targets: str, adapters: int) -> None:
    """PEFT reports these counts for Llama-3 8B with rank 8."""
    spec = build_spec("llama3-8b", {"lora_rank": 8, "lora_targets": targets})
    peak = find_peak(spec, 0)
    assert peak.levels[OPTIMIZER] == 4 * adapters  # two bf16 moments
    assert get_stage_memory(spec).get_gradient_bytes(0) == 2 * adapters


def test_frozen_weights_are_quantized_and_the_vocabulary_is_not() -> None:
    levels = {name: find_peak(build_spec("llama3-8b", {"lora_rank": 8, "frozen_weights": name}), 0).levels
              for name in ("own", "int8", "nf4")}  # fmt: skip
    linear = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336)
    assert levels["own"][PARAMETERS] - levels["int8"][PARAMETERS] == linear
    assert levels["int8"][PARAMETERS] - levels["nf4"][PARAMETERS] == pytest.approx(linear * (0.5 - 0.0159), rel=1e-3)


def test_optimizers_keep_their_state() -> None:
    parameters, elements = 1_235_814_400, {}
    for name in ("adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"):
        spec = build_spec("llama3-1b", {"optimizer": name}, train={"precision": "bf16"})
        elements[name] = (find_peak(spec, 0).levels[OPTIMIZER] - 4 * parameters) / parameters  # without master weights
    assert elements["adamw"] == 8
    assert elements["adamw_8bit"] == pytest.approx(2.03, abs=0.01)
    assert elements["paged_adamw_8bit"] == 0
    assert elements["adafactor"] < 0.01
    hidden = 16 * (2048 * (2048 + 512) * 2 + 3 * 2048 * 8192)
    assert elements["muon"] == pytest.approx(8 - 4 * hidden / parameters, abs=1e-3)


def test_offload_moves_state_to_the_cpu() -> None:
    plain, offloaded, both = (
        build_spec("llama3-8b", {"offload": name}) for name in ("none", "optimizer", "optimizer_and_parameters")
    )
    state = 8_030_261_248 * 4
    assert get_host_bytes(plain, 0) == 0
    assert get_host_bytes(offloaded, 0) == state + 8_030_261_248 * 2  # moments and gradients
    assert get_host_bytes(both, 0) == state + 8_030_261_248 * 4
    assert find_peak(offloaded, 0).levels[OPTIMIZER] == 0
    assert find_peak(both, 0).levels[PARAMETERS] == 0
    assert get_bytes(plain) > get_bytes(offloaded) > get_bytes(both)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shards_what_it_shards(zero: int) -> None:
    one = find_peak(build_spec("llama3-8b", {"optimizer": "adamw_8bit"}), 0).levels
    four = find_peak(build_spec("llama3-8b", {"optimizer": "adamw_8bit"}, layout={"dp": 4, "zero": zero}), 0).levels
    assert four[OPTIMIZER] == pytest.approx(one[OPTIMIZER] / (4 if zero >= 1 else 1), rel=1e-6)
    assert four[GRADIENTS] == pytest.approx(one[GRADIENTS] / (4 if zero >= 2 else 1), rel=0.05)


@pytest.mark.parametrize(
    "option",
    [
        {"optimizer": "adamw_8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "muon"},
        {"optimizer_in_backward": True},
        {"lora_rank": 16},
        {"offload": "optimizer"},
        {"offload_activations": True},
        {"chunked_loss": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}], ids=str)
def test_option_never_needs_more_memory(option: dict[str, Any], layout: dict[str, Any]) -> None:
    schedule = {"schedule": "gpipe"} if "optimizer_in_backward" in option else {}  # it needs one micro-batch
    train = {"micro_batches": 1 if schedule or "pp" not in layout else 2}
    layout = {**layout, **schedule}
    without = build_spec("llama3-1b", {}, layout=layout, train=train)
    assert get_bytes(build_spec("llama3-1b", option, layout=layout, train=train)) <= get_bytes(without)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "bf16_state"])
def test_plan_without_methods_is_near_the_plan_of_the_trainer(layout: dict[str, Any], precision: str) -> None:
    train = {"precision": precision}
    own = get_bytes(build_spec("llama3-8b", None, layout=layout, train=train))
    assert get_bytes(build_spec("llama3-8b", {}, layout=layout, train=train)) == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize(
    ("memory", "train", "field"),
    [
        ({"frozen_weights": "nf4"}, {}, "memory.frozen_weights"),
        ({"lora_rank": 5000}, {}, "memory.lora_rank"),
        ({"lora_rank": 0}, {}, "memory.lora_rank"),
        ({"optimizer": "adam"}, {}, "memory.optimizer"),
        ({"optimizer_in_backward": True}, {"micro_batches": 2}, "memory.optimizer_in_backward"),
        ({"lora_rank": 8}, {"precision": "fp8"}, "memory"),
    ],
)
def test_wrong_options_are_named(memory: dict[str, Any], train: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_spec("llama3-8b", memory, train=train)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_trainer_refuses_memory_options() -> None:
    assert [p.field for p in find_unsupported_fields(build_spec("llama3-8b", {"lora_rank": 8}))] == [
        "resources.stack",
        "memory",
    ]


def test_estimate_states_cpu_memory_only_with_options() -> None:
    cluster = CLUSTERS["a100-80gb"]
    made = estimate(build_spec("llama3-8b", {"offload": "optimizer"}), cluster)
    assert made["host_memory_bytes"] == 8_030_261_248 * 6
    assert "host_memory_bytes" not in estimate(build_spec("llama3-8b", None), cluster)
    assert isinstance(get_stage_memory(build_spec("llama3-8b", {})), OptionsMemory)
