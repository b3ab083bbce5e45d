"""Layouts of other tools' config files: recognition, degrees, defaults, errors, and bounds."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.spec_rules import find_problems
from planner.facts.tool_layouts.documents import MAX_FILE_BYTES, MAX_VALUES
from planner.facts.tool_layouts.recognition import TOOLS, read_layout
from planner.facts.tool_layouts.settings import MAX_LISTED_KEYS
from planner.facts.validation import SpecError
from tests.planner.facts.tool_layouts import cases
from tests.planner.facts.tool_layouts.cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.source for case in CASES])
def test_layout_of_a_published_config(case: Case) -> None:
    found = read_layout(case.text, case.ranks)
    layout, train = found.spec["layout"], found.spec["train"]
    assert found.tool == case.tool
    assert {name: layout.get(name) for name in case.layout} == case.layout
    assert {name: train.get(name) for name in case.train} == case.train
    assert found.not_understood == case.unread
    spec = parse_fields({"model": {"preset": "llama3-8b"}, **found.spec})
    assert spec.layout.world_size == found.ranks == (case.ranks or found.ranks)
    assert (count_parameters(spec.model) if "model" in found.spec else None) == case.parameters
    if case.stack:
        assert spec.resources.stack == case.stack
    if case.parameters:
        assert find_problems(spec) == []


def test_all_tools_have_cases() -> None:
    assert len(CASES) >= 20
    assert {case.tool for case in CASES} == {tool.name for tool in TOOLS} | {"LitGPT"}


def read_error(text: str, ranks: int | None = None) -> str:
    with pytest.raises(SpecError) as error:
        read_layout(text, ranks)
    (problem,) = error.value.problems
    assert problem.field == "text"
    return problem.message


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("", None, "The file is empty."),
        ("{", None, "The file is not valid JSON:"),
        ("[parallelism]\ntensor_parallel_degree = ", None, "The file is not valid TOML:"),
        ("a: [", None, "cannot be read as YAML:"),
        ("just words", None, "is not a mapping of settings."),
        (
            "services:\n  web: {image: nginx}",
            None,
            "Its first settings are `services.web.image`. Known tools: torchtitan",
        ),
        ('{"model_type": "llama", "hidden_size": 64}', None, "config.json of a Hugging Face model"),
        (cases.DS_PIPE[:-2] + ', "parallelism": {"tp": 2}}', None, "settings of DeepSpeed and nanotron."),
        (cases.TITAN_405B, None, "Enter the number of ranks, a multiple of 8 (tp 8 x pp 1 x cp 1 x replicas 1)."),
        (cases.TITAN_405B, 12, "The number of ranks is 12, which is not a multiple of 8"),
        (cases.TITAN_HSDP, 8, "The number of ranks is 8, but the degrees in the file need 16 ranks."),
        (cases.GPT3_CP, None, "The file of Megatron-LM does not contain the number of ranks"),
        (cases.MIXTRAL_8X22B, 0, "The number of ranks is 0."),
        (cases.MIXTRAL_8X22B, 16 * 24, "`--global-batch-size` is 256, which is not a multiple of 24"),
        (cases.DS_AUTO, None, "The file of DeepSpeed does not contain the number of ranks"),
        (
            cases.TITAN_405B.replace("tensor_parallel_degree = 8", 'tensor_parallel_degree = "many"'),
            64,
            '`parallelism.tensor_parallel_degree` is "many". Use one whole number from 1 to 65,536.',
        ),
        (
            cases.TITAN_671B.replace("Interleaved1F1B", "ScheduleOfMine"),
            256,
            '`parallelism.pipeline_parallel_schedule` is "ScheduleOfMine". The planner knows these values: 1f1b,',
        ),
        (
            cases.MIXTRAL_8X22B.replace("size: 8\n  --use", "size: ${PP}\n  --use"),
            128,
            '`--pipeline-model-parallel-size` is "${PP}". The file does not set this variable.',
        ),
        (
            cases.MEGATRON_FSDP + "torchrun --tensor-model-parallel-size 2",
            None,
            '`--tensor-model-parallel-size` is ["1", "2"]. Use one whole number',
        ),
        (
            cases.ACCELERATE_ND.replace("num_processes: 8", "num_processes: 4"),
            None,
            "`num_processes` is 4. The sizes in parallelism_config need 8 processes.",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}",
            None,
            "Import that file instead.",
        ),
        (cases.DS_PIPE.replace("256", "100"), None, "`train_batch_size` is 100. Use a multiple of micro-batch size 8"),
        (cases.NEMO_2.replace("context_parallel_size: 2", "context_parallel_size: 0"), None, "is 0. Use one whole"),
        (
            cases.NEMO_2 + "\nmodel:\n  tensor_model_parallel_size: 4\n",
            None,
            "`model.tensor_model_parallel_size` is 4, but `trainer.strategy.tensor_model_parallel_size` is 2.",
        ),
        (
            cases.LIGHTNING_DEEPSPEED.replace("deepspeed_stage_2_offload", "horovod"),
            None,
            "The planner knows DDP, FSDP,",
        ),
    ],
)
def test_error_names_the_setting_and_the_fix(text: str, ranks: int | None, words: str) -> None:
    assert words in read_error(text, ranks)


def test_defaults_and_differences_are_reported() -> None:
    found = read_layout(cases.GPT3_175B)
    assert "`--context-parallel-size` is not in the file. The default of Megatron-LM is 1." in found.assumed
    assert "The plan uses the final batch size of `rampup_batch_size`." in found.notes
    assert "The plan uses bf16 instead of fp16, which has the same number of bytes." in found.notes
    offloads = read_layout(cases.DS_AUTO, 8).notes
    assert "The plan keeps the weights in GPU memory, without offload to cpu." in offloads
    assert any("`train_batch_size`, `train_micro_batch_size_per_gpu`" in note for note in offloads)
    assert (
        read_layout(cases.GPT3_175B, 512).notes[0] == "The plan uses 512 ranks instead of the 1024 ranks in the file."
    )
    assert (
        "The script has conditions (`if`). The plan uses the arguments of all branches."
        in read_layout(cases.LLAMA3_8B_FP8).notes
    )


def test_unknown_settings_are_listed_with_their_whole_key() -> None:
    text = cases.TITAN_HSDP + '[mystery]\nknob = 3\n[parallelism.inner]\nname = "x"\n'
    assert read_layout(text).not_understood == ("parallelism.inner.name", "mystery.knob")
    script = cases.MEGATRON_FSDP.strip() + " --frobnicate 3 --no-flag\n"
    assert read_layout(script).not_understood == ("--frobnicate", "--no-flag")


def test_number_of_listed_settings_is_limited() -> None:
    many = "".join(f"knob_{number} = 1\n" for number in range(MAX_LISTED_KEYS + 7))
    found = read_layout(cases.TITAN_HSDP + f"[mystery]\n{many}")
    assert len(found.not_understood) == MAX_LISTED_KEYS
    assert "7 more settings were not understood." in found.notes


def test_model_without_vocabulary_is_not_imported() -> None:
    found = read_layout(cases.MIXTRAL_8X22B.replace("  --vocab-size: 32768\n", ""), 128)
    assert "model" not in found.spec
    assert (
        "The model was not imported. `--vocab-size` is missing. Add it to the file, or choose the model." in found.notes
    )


def test_layers_other_than_attention_are_not_imported() -> None:
    found = read_layout(cases.MIXTRAL_8X22B + "\n  --hybrid-override-pattern: M-M*\n".replace("\n  ", "\n"), 128)
    assert found.spec["layout"]["tp"] == 2
    text = cases.MIXTRAL_8X22B.replace("MODEL_ARGS:", "MODEL_ARGS:\n  --hybrid-override-pattern: M-M*")
    assert any("no layers other than attention" in note for note in read_layout(text, 128).notes)


def test_variables_of_a_script() -> None:
    script = """
    TP=2; PP=${PP:-4}
    NODES=4
    TP=2
    export GPUS=8
    OPTIONS=" --tensor-model-parallel-size ${TP} \\
        --pipeline-model-parallel-size $((TP * 2)) --micro-batch-size=1 \\
        --global-batch-size $((8 * NODES)) --seq-length 128"
    torchrun --nproc_per_node=$GPUS --nnodes=${NODES} pretrain_gpt.py ${OPTIONS}
    """
    found = read_layout(script)
    assert {axis: found.spec["layout"][axis] for axis in ("dp", "tp", "pp")} == {"dp": 4, "tp": 2, "pp": 4}
    assert found.spec["train"]["global_batch"] == 32


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
)
MERGES = "a0: &a0 {x0: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 20)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" * (MAX_FILE_BYTES + 1), "too long"),
        (BOMB, f"more than {MAX_VALUES} values"),
        ("a: &a\n  b: *a\n  parallelism: {dp: 1}", "nested too deeply"),
        ("a: &a [*a]", "nested too deeply"),
        ("[" * 20_000, "nested too deeply"),
        ("- " * 20_000, "nested too deeply"),
        ("? " * 20_000, "nested too deeply"),
        ("{" * 20_000, "not valid JSON"),
        ('{"a":' * 10_000, "nested too deeply"),
        ("[a]\nb = " + "[" * 20_000, "nested too deeply"),
        ("a: !!python/object/apply:os.system [ls]", "cannot be read as YAML"),
        ("a: 1\n" * 6_000, "not a config"),
        ("\n".join(f"a{n}: 1" for n in range(6_000)), f"more than {MAX_VALUES} values"),
    ],
)
def test_large_and_hostile_files_are_refused(text: str, words: str) -> None:
    assert words in read_error(text)


def test_merge_keys_are_not_expanded() -> None:
    assert f"more than {MAX_VALUES} values" in read_error(MERGES)


@pytest.mark.parametrize("value", ["$((9**9**9))", "$((2*" + "9*" * 400 + "9))", "$(reboot)", "${A:-${B:-$A}}", "'"])
def test_hostile_words_of_a_script_are_not_evaluated(value: str) -> None:
    script = f"A={value}\nB=$A$A$A$A\nA=$B$B$B$B\npretrain.py --num-layers $A --tensor-model-parallel-size $A"
    assert "--tensor-model-parallel-size` is" in read_error(script, 8)


@given(st.text(max_size=200), st.sampled_from(CASES), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_damaged_files_give_a_layout_or_an_error(noise: str, case: Case, place: int) -> None:
    text = case.text[:place] + noise + case.text[place:]
    with suppress(SpecError):
        json.dumps(read_layout(text, case.ranks).spec, allow_nan=False)


def change_values(data: Any, value: Any) -> list[Any]:
    """Return copies of a mapping, each with one value replaced."""
    return [
        {**data, key: one}
        for key, inner in data.items()
        for one in (change_values(inner, value) if isinstance(inner, dict) else [value])
    ]


@pytest.mark.parametrize("value", [None, [], {}, True, -1, 10**30, "x", [[1]], {"a": 1}, 0.5, "${A}"])
def test_every_value_may_have_any_type(value: Any) -> None:
    for text in (cases.DS_PIPE, cases.DS_AUTO, cases.DS_TP):
        for changed in change_values(json.loads(text), value):
            with suppress(SpecError):
                json.dumps(read_layout(json.dumps(changed), 8).spec, allow_nan=False)
