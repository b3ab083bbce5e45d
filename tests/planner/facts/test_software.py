"""Software options of a spec: accepted values, rejected combinations, and descriptions."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from planner.facts.parse_spec import parse_spec
from planner.facts.resources import STACK_OPTIONS, SoftwareSpec, StackName, format_software, get_option_names
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError

DENSE: dict[str, Any] = {"preset": "gpt-tiny"}
MIXED: dict[str, Any] = {"preset": "mixtral-tiny"}
VALUES: dict[str, tuple[Any, str]] = {  # a non-default value for each field, and a stack that supports it
    "cuda_graphs": ("whole", "megatron"),
    "deterministic": (True, "megatron"),
    "dispatcher": ("alltoall", "megatron"),
    "overlap_experts": (True, "megatron"),
    "attention_kernel": ("flash_2", "megatron"),
    "fused_norms": (True, "scaling"),
    "nvfp4": (True, "megatron"),
}


def _spec(
    stack: str, model: dict[str, Any] = MIXED, attention: str = "fused", precision: str = "fp8", **software: Any
) -> JobSpec:
    resources = {"device": "cuda", "stack": stack, "software": software}
    train = {"attention": attention, "precision": precision}
    return parse_spec({"model": model, "resources": resources, "train": train})


def collect_problems(stack: str, **software: Any) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as refused:
        _spec(stack, **software)
    return [(p.field, p.message) for p in refused.value.problems]


def test_values_table_lists_every_field() -> None:
    assert set(VALUES) == set(SoftwareSpec.model_fields)


@pytest.mark.parametrize("field", VALUES)
def test_field_is_accepted_only_for_stacks_with_that_option(field: str) -> None:
    value, owner = VALUES[field]
    assert getattr(_spec(owner, **{field: value}).resources.software, field) == value
    for stack in get_args(StackName):
        if field in get_option_names(stack):
            continue
        ((place, text),) = collect_problems(stack, **{field: value})
        assert place == f"resources.software.{field}"
        assert f"Omit it, or use {owner}" in text
        assert f"`{place}` is set, but `resources.stack` is {stack}." in text


@pytest.mark.parametrize("stack", get_args(StackName))
def test_empty_software_is_valid_for_every_stack(stack: str) -> None:
    assert _spec(stack).resources.software == SoftwareSpec()
    assert format_software(SoftwareSpec()) == format_software(None) == ""


@pytest.mark.parametrize("field", ["dispatcher", "overlap_experts"])
def test_expert_options_require_a_model_with_experts(field: str) -> None:
    value, owner = VALUES[field]
    ((place, text),) = collect_problems(owner, model=DENSE, **{field: value})
    assert place == f"resources.software.{field}"
    assert text == f"`{place}` is set, but the model has no experts. Omit it."


@pytest.mark.parametrize(
    ("stack", "attention", "kernel", "words"),
    [
        (
            "megatron",
            "unfused",
            "flash_2",
            "is flash_2, but `train.attention` is unfused. Set `train.attention` to fused.",
        ),
        ("scaling", "fused", "eager", "is eager, but `train.attention` is fused. Set `train.attention` to unfused."),
        ("megatron", "fused", "flash_1", "is flash_1. For megatron, use own or flash_2."),
    ],
)
def test_attention_kernel_must_match_stack_and_attention(stack: str, attention: str, kernel: str, words: str) -> None:
    field = "resources.software.attention_kernel"
    assert collect_problems(stack, attention=attention, attention_kernel=kernel) == [(field, f"`{field}` {words}")]
    assert _spec("scaling", attention="unfused", attention_kernel="eager")


def test_nvfp4_requires_fp8_precision() -> None:
    told = collect_problems("megatron", precision="bf16", nvfp4=True)
    text = "is on, but `train.precision` is bf16. Use an fp8 precision, or turn it off."
    assert told == [("resources.software.nvfp4", f"`resources.software.nvfp4` {text}")]


def test_unknown_value_is_rejected_with_allowed_values() -> None:
    ((place, text),) = collect_problems("megatron", cuda_graphs="some")
    assert place == "resources.software.cuda_graphs"
    assert text.startswith(f"`{place}` is \"some\". Use 'none', 'router', 'attention'")


def test_every_value_has_a_description() -> None:
    kinds = SoftwareSpec.model_json_schema()["properties"]
    for name, schema in kinds.items():
        for value in schema.get("enum", [False, True]):
            said = format_software(SoftwareSpec.model_validate({name: value}))
            assert bool(said) == (value != schema["default"]), (name, value)
    both = SoftwareSpec(cuda_graphs="attention", dispatcher="alltoall")
    assert format_software(both) == ", CUDA graphs of attention, all-to-all token dispatch"


def test_every_stack_option_is_a_spec_field() -> None:
    assert {name for fields in STACK_OPTIONS.values() for name in fields} <= set(SoftwareSpec.model_fields)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 64}, "model.head_dim"),
        ({"sliding_window": 64}, "model.sliding_window"),
        ({"moe": {"expert_bias": True}}, "model.moe.expert_bias"),
        ({"moe": {"swiglu_limit": 7.0}}, "model.moe.swiglu_limit"),
    ],
)
def test_model_feature_without_trainer_support_can_be_planned_but_not_run(change: dict[str, Any], field: str) -> None:
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64} | change.pop("moe", {})
    spec = parse_spec({"model": {**MIXED, "moe": moe, **change}})
    (told,) = find_unsupported_fields(spec)
    assert told.field == field
    assert "the trainer does not support" in told.message


def test_default_head_size_runs() -> None:
    model = parse_spec({"model": MIXED}).model
    usual = model.hidden_size // model.num_heads
    assert find_unsupported_fields(parse_spec({"model": {**MIXED, "head_dim": usual}})) == []


def test_explicit_head_size_needs_no_division_but_must_be_even_and_not_latent() -> None:
    sizes = {**MIXED, "hidden_size": 100, "num_heads": 8, "num_kv_heads": 8}
    with pytest.raises(SpecError, match=r"hidden_size 100 is not divisible by 8"):
        parse_spec({"model": sizes})
    assert parse_spec({"model": {**sizes, "head_dim": 16}}).model.head_size == 16
    with pytest.raises(SpecError, match=r"`model\.head_dim` is 15, but RoPE needs an even head size"):
        parse_spec({"model": {**sizes, "head_dim": 15}})
    mla = {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 8}
    with pytest.raises(SpecError, match=r"latent attention sets its own head sizes"):
        parse_spec({"model": {**MIXED, "head_dim": 16, "mla": mla}})
