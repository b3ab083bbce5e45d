"""Models of Hugging Face configs: parameter counts of published models, errors, and plans.

`data/hugging_face_configs.json` has the fields of 77 published config.json files that describe the model. The counts
are those of the model classes of transformers 5.23 on the meta device: parameters, with tied tables once, and stored
buffers such as the router bias of DeepSeek-V3. `reference` names the class. Families without a class there were
counted with a class of equal shape, and deepseek-moe-16b has the published count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.estimate import estimate, parse_plannable
from planner.cost.memory import get_layer_bytes
from planner.facts.hugging_face import MAX_CONFIG_BYTES, parse_config, read_config
from planner.facts.model_shapes import compute_score_flops, count_active_parameters, count_parameters
from planner.facts.spec import JobSpec, Layout, ModelSpec, TrainSpec
from planner.facts.spec_rules import find_problems, find_unsupported_fields
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS

ROWS = json.loads((Path(__file__).parent / "data" / "hugging_face_configs.json").read_text())
CONFIGS = {row["model"]: row["config"] for row in ROWS}
LLAMA = CONFIGS["meta-llama/Llama-3.2-1B"]


def test_parameters_of_published_models_are_exact() -> None:
    found = {row["model"]: count_parameters(read_config(row["config"]).model) for row in ROWS}
    assert found == {row["model"]: row["parameters"] for row in ROWS}
    assert len(ROWS) >= 50


def test_active_parameters_of_a_mixture_with_a_gated_shared_expert() -> None:
    model = read_config(CONFIGS["Qwen/Qwen1.5-MoE-A2.7B"]).model
    inactive = 24 * (60 - 4) * 3 * 2048 * 1408  # layers x inactive experts x matrices of an expert
    assert count_active_parameters(model) == 14_315_784_192 - inactive


@pytest.mark.parametrize("stack", ["ours", "megatron", "fsdp2"])
def test_each_model_has_a_plan(stack: str) -> None:
    for name, config in [*CONFIGS.items()][:: 1 if stack == "ours" else 6]:
        model = read_config(config).model
        tp = next(n for n in (2, 1) if _can_split(model, n))
        layout = {"dp": 8, "zero": 3, "recompute": "selective", "tp": tp, "sequence_parallel": tp > 1}
        train = {"global_batch": 16, "seq_len": 1024, "precision": "bf16"}
        resources = {"device": "cuda", "stack": stack}
        spec = parse_plannable({"model": model.model_dump(), "layout": layout, "train": train, "resources": resources})
        made = estimate(spec, CLUSTERS["h100"])
        assert made["time"]["step_s"] > 0, name


def _can_split(model: ModelSpec, tp: int) -> bool:
    return not find_problems(JobSpec(model=model, layout=Layout(tp=tp), train=TrainSpec(seq_len=tp)))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "openai-community/gpt2", "mistralai/Mixtral-8x7B-v0.1"])
def test_model_without_other_layers_can_run(name: str) -> None:
    spec = parse_plannable({"model": read_config(CONFIGS[name]).model.model_dump()})
    assert spec.model.block is None
    assert not find_unsupported_fields(spec)


def test_other_layers_can_be_planned_but_not_run() -> None:
    spec = parse_plannable({"model": read_config(CONFIGS["Qwen/Qwen3-8B"]).model.model_dump()})
    (problem,) = find_unsupported_fields(spec)
    assert problem.field == "model.block"
    assert "query_norm head" in problem.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "`config.hidden_size` is missing. Add it"),
        ({"hidden_size": "2048"}, '`config.hidden_size` is "2048". Use a whole number'),
        ({"hidden_size": True}, "`config.hidden_size` is true"),
        ({"hidden_size": 2**2000}, "`config.hidden_size` is a very large number"),
        ({"num_hidden_layers": 4000}, "Use a whole number from 1 to 1,024"),
        ({"num_key_value_heads": 5}, "Use a divisor of the 32 attention heads"),
        ({"attention_bias": 1}, "`config.attention_bias` is 1. Use true or false"),
        ({"rope_scaling": 8}, "`config.rope_scaling` is 8. Use an object"),
        ({"rope_theta": float("nan")}, "`config.rope_theta` is NaN. Use a number above 1"),
        ({"model_type": ["llama"]}, '`config.model_type` is ["llama"]. Use text'),
        ({"is_encoder_decoder": True}, "Use a decoder-only model"),
        ({"layer_types": ["full_attention", "mamba"]}, 'Layer 1 is "mamba", whose cost the planner does not predict'),
        ({"hybrid_override_pattern": "*-M-"}, 'Layer 2 is "M"'),
        ({"model_type": "jamba"}, "This model has mamba layers"),
        ({"num_experts": 8}, "`config.num_experts` is 8. Models of type llama have no such field"),
        ({"model_type": "new", "slots": 4}, "does not know these fields: `slots`. Use a config of a known family"),
    ],
    ids=str,
)
def test_error_names_field_value_and_fix(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_config({**LLAMA, **change})
    assert words in caught.value.problems[0].sentence


@pytest.mark.parametrize("text", ["", "[]", "[" * 50_000, " " * (MAX_CONFIG_BYTES + 1), b"\xff", "3"])
def test_text_without_a_config_is_refused(text: str | bytes) -> None:
    with pytest.raises(SpecError) as caught:
        parse_config(text)
    assert caught.value.problems[0].field == "config"


def test_unknown_model_type_is_marked_as_assumed() -> None:
    found = read_config({**LLAMA, "model_type": "new"})
    assert found.is_assumed
    assert found.model == read_config(LLAMA).model
    assert found.notes == ('The model type "new" is unknown. The plan assumes layers like those of Llama.',)


def test_notes_list_what_the_plan_leaves_out() -> None:
    change = {"num_nextn_predict_layers": 1, "quantization_config": {"bits": 8}, "frobnication": 3, "unused": None}
    notes = read_config({**LLAMA, **change}).notes
    assert [note for note in notes if "`frobnication`." in note]
    assert len(notes) == 3


def test_text_config_of_a_multimodal_model_is_planned() -> None:
    found = read_config({"model_type": "gemma3", "text_config": CONFIGS["google/gemma-3-1b-pt"], "vision_config": {}})
    assert count_parameters(found.model) == 999_885_952
    assert found.notes == ("The plan contains only the language model in `text_config`.",)


def test_windows_of_most_layers_reduce_attention() -> None:
    model = read_config(CONFIGS["google/gemma-3-1b-pt"]).model
    keys = 4 * 8192 + 22 * 512  # every sixth of 26 layers has full attention
    assert compute_score_flops(model, 8192) == 4 * keys * 4 * 256


def _count_layer_bytes(model: ModelSpec) -> int:
    train = {"global_batch": 1, "seq_len": 1024, "precision": "bf16"}
    return get_layer_bytes(parse_plannable({"model": model.model_dump(), "train": train}))


def test_layer_memory_counts_the_tensors_of_each_part() -> None:
    usual = read_config(LLAMA).model
    hidden, queries_and_keys = 1024 * 2048 * 2, 1024 * (32 + 8) * 64 * 2
    saved = _count_layer_bytes(usual)

    def add(**block: object) -> int:
        return _count_layer_bytes(ModelSpec.model_validate({**usual.model_dump(), "block": block})) - saved

    assert add(query_norm="head") == queries_and_keys
    assert add(num_norms=4) == 2 * hidden
    assert add(parallel=True) == -hidden  # both norms save the same input
    assert add(parallel=True, num_norms=1) == -2 * hidden  # and have the same output
    assert add(qkv_bias=True, norm_bias=True, attention_sinks=True) == 0


def test_queries_without_a_rank_save_no_latent() -> None:
    config = CONFIGS["deepseek-ai/DeepSeek-V2-Lite"]
    whole = read_config(config).model
    compressed = read_config({**config, "q_lora_rank": 512}).model
    assert _count_layer_bytes(compressed) - _count_layer_bytes(whole) == 2 * 1024 * 512 * 2


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"num_norms": 1}, "model.block.num_norms"),
        ({"num_norms": 4, "parallel": True}, "model.block.num_norms"),
        ({"windowed_layers": 2}, "model.block.windowed_layers"),
    ],
    ids=str,
)
def test_block_with_contradictions_is_refused(block: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_plannable({"model": {**read_config(LLAMA).model.model_dump(), "block": block}})
    assert [problem.field for problem in caught.value.problems] == [field]


VALUES = st.sampled_from([None, 0, -1, 1, 2**70, 1e308, float("inf"), "x", True, [], {}, [1] * 2000, ["mamba"], 7, 128])
NAMES = st.sampled_from(sorted({name for config in CONFIGS.values() for name in config} | {"text_config", "other"}))


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), changes=st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_config_is_read_or_refused(name: str, changes: dict[str, Any]) -> None:
    try:
        found = read_config({**CONFIGS[name], **changes})
    except SpecError:
        return
    spec = parse_plannable({"model": {"preset": "gpt-tiny"}}).model_copy(update={"model": found.model})
    assert not [problem for problem in find_problems(spec) if problem.field.startswith("model.block")]
