"""What a spec may say of the software that it is planned for."""

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
VALUES: dict[str, tuple[Any, str]] = {  # of each field another value than its default, and the stack that has it
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


def _refused(stack: str, **software: Any) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as refused:
        _spec(stack, **software)
    return [(p.field, p.message) for p in refused.value.problems]


def test_the_table_above_has_every_field() -> None:
    assert set(VALUES) == set(SoftwareSpec.model_fields)


@pytest.mark.parametrize("field", VALUES)
def test_a_field_is_taken_of_a_stack_that_leaves_it_open_and_refused_of_any_other(field: str) -> None:
    value, owner = VALUES[field]
    assert getattr(_spec(owner, **{field: value}).resources.software, field) == value
    for stack in get_args(StackName):
        if field in get_option_names(stack):
            continue
        ((place, text),) = _refused(stack, **{field: value})
        assert place == f"resources.software.{field}"
        assert f"Omit it, or use {owner}" in text
        assert f"`{place}` is set, but `resources.stack` is {stack}." in text


@pytest.mark.parametrize("stack", get_args(StackName))
def test_what_says_nothing_goes_with_any_stack(stack: str) -> None:
    assert _spec(stack).resources.software == SoftwareSpec()
    assert format_software(SoftwareSpec()) == format_software(None) == ""


@pytest.mark.parametrize("field", ["dispatcher", "overlap_experts"])
def test_what_is_of_experts_asks_for_some(field: str) -> None:
    value, owner = VALUES[field]
    ((place, text),) = _refused(owner, model=DENSE, **{field: value})
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
def test_a_kernel_is_one_that_the_stack_has_and_of_the_attention_that_is_trained_with(
    stack: str, attention: str, kernel: str, words: str
) -> None:
    field = "resources.software.attention_kernel"
    assert _refused(stack, attention=attention, attention_kernel=kernel) == [(field, f"`{field}` {words}")]
    assert _spec("scaling", attention="unfused", attention_kernel="eager")


def test_fp4_stands_in_place_of_fp8() -> None:
    told = _refused("megatron", precision="bf16", nvfp4=True)
    text = "is on, but `train.precision` is bf16. Use an fp8 precision, or turn it off."
    assert told == [("resources.software.nvfp4", f"`resources.software.nvfp4` {text}")]


def test_a_value_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    ((place, text),) = _refused("megatron", cuda_graphs="some")
    assert place == "resources.software.cuda_graphs"
    assert text.startswith(f"`{place}` is \"some\". Use 'none', 'router', 'attention'")


def test_every_value_has_words() -> None:
    kinds = SoftwareSpec.model_json_schema()["properties"]
    for name, schema in kinds.items():
        for value in schema.get("enum", [False, True]):
            said = format_software(SoftwareSpec.model_validate({name: value}))
            assert bool(said) == (value != schema["default"]), (name, value)
    both = SoftwareSpec(cuda_graphs="attention", dispatcher="alltoall")
    assert format_software(both) == ", CUDA graphs of attention, all-to-all token dispatch"


def test_all_that_is_open_is_a_field() -> None:
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
def test_a_model_that_the_trainer_has_not_can_be_planned_and_is_refused_a_run(
    change: dict[str, Any], field: str
) -> None:
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64} | change.pop("moe", {})
    spec = parse_spec({"model": {**MIXED, "moe": moe, **change}})
    (told,) = find_unsupported_fields(spec)
    assert told.field == field
    assert "the trainer does not support" in told.message


def test_a_head_of_the_usual_size_runs() -> None:
    model = parse_spec({"model": MIXED}).model
    usual = model.hidden_size // model.num_heads
    assert find_unsupported_fields(parse_spec({"model": {**MIXED, "head_dim": usual}})) == []


def test_a_heads_own_size_needs_no_division_but_is_even_and_not_of_latent_attention() -> None:
    sizes = {**MIXED, "hidden_size": 100, "num_heads": 8, "num_kv_heads": 8}
    with pytest.raises(SpecError, match=r"hidden_size 100 is not divisible by 8"):
        parse_spec({"model": sizes})
    assert parse_spec({"model": {**sizes, "head_dim": 16}}).model.head_size == 16
    with pytest.raises(SpecError, match=r"`model\.head_dim` is 15, but RoPE needs an even head size"):
        parse_spec({"model": {**sizes, "head_dim": 15}})
    mla = {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 8}
    with pytest.raises(SpecError, match=r"latent attention sets its own head sizes"):
        parse_spec({"model": {**MIXED, "head_dim": 16, "mla": mla}})
