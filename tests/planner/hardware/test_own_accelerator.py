"""Accelerators from data sheets without a published step, and accelerators that a user describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.__main__ import main
from planner.cost.estimate import estimate, parse_plannable
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.own_accelerator import OWN_EXAMPLE, parse_own_cluster
from planner.hardware.stack_options import UNMEASURED_MARGIN

OWN = OWN_EXAMPLE.strip("`")
FLAGS = ["estimate", "--model", "llama3-8b", "--dp", "8", "--zero", "3", "--json", "--stack", "megatron"]


@pytest.mark.parametrize("name", ["mi325x", "a800", "h800", "h20", "l40s", "rtx-a6000", "rtx-3090", "rtx-4090"])
def test_no_step_confirms_the_data_sheet(name: str) -> None:
    spec = {"model": {"preset": "llama3-8b"}, "resources": {"device": "cuda", "stack": "megatron"}}
    interval = estimate(parse_plannable(spec), CLUSTERS[name])["time"]["interval"]
    assert interval["share"] >= UNMEASURED_MARGIN
    assert "without a measured step on this device" in interval["words"]


def test_own_numbers_of_an_h100_are_those_of_its_data_sheet() -> None:
    own, sheet = parse_own_cluster(OWN), CLUSTERS["h100"]
    assert (own.node, own.network, own.per_node) == (sheet.node, sheet.network, sheet.per_node)
    chip, known = own.accelerator, sheet.accelerator
    assert (chip.bytes_per_s, chip.num_sms, chip.memory_bytes) == (known.bytes_per_s, known.num_sms, 80 * 10**9)
    assert (chip.bf16_flops, chip.fp32_flops, chip.fp8_flops) == (989e12, 989e12 / 16, None)


def test_own_accelerator_from_arguments_and_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numbers = dict(part.split("=") for part in OWN.removeprefix("own:").split(","))
    (tmp_path / "chip.json").write_text(json.dumps({name: float(number) for name, number in numbers.items()}))
    answers = []
    for words in ([f"{name}={number}" for name, number in numbers.items()], [str(tmp_path / "chip.json")]):
        assert main([*FLAGS, "--accelerator", *words]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["time"]["interval"]["share"] >= UNMEASURED_MARGIN
    assert answers[0]["time"]["interval"]["words"].startswith("own figures, Megatron")
    assert main([*FLAGS, "--accelerator", "memory_gb=80", "--cluster", "h100"]) == 2
    assert "`--cluster` is h100, but `--accelerator` describes another cluster." in capsys.readouterr().err
    assert main([*FLAGS, "--accelerator", "memory_gb=1"]) == 2
    assert "`--accelerator.memory_gb` is 1. Use more than 2.2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("989", "-1"), "`cluster.bf16_tflops` is -1. Use more than 0."),
        (OWN.replace("989", "989T"), '`cluster.bf16_tflops` is "989T". Use a number.'),
        (OWN.replace("989", "NaN"), "`cluster.bf16_tflops` is NaN."),
        (OWN.replace("989", "1e30"), "`cluster.bf16_tflops` is 1e+30. Use at most 1e+06."),
        (OWN.replace("memory_gb=80,", ""), "`cluster.memory_gb` is missing. Add it."),
        (f"{OWN},gpus_per_node=1.5", "`cluster.gpus_per_node` is 1.5."),
        (f"{OWN},fp8=3", "`cluster.fp8` is not a known field. Remove it. Fields: memory_gb, bf16_tflops,"),
        (f"{OWN},memory_gb=90", "`cluster.memory_gb` is set twice. Remove one value."),
        (f"{OWN},80", "`cluster` has '80' without a value. Use FIELD=NUMBER."),
        (f"{OWN},name=<b>", '`cluster.name` is "<b>".'),
        (f"{OWN},name={'x' * 200}", "characters. Use at most 200."),
    ],
)
def test_names_each_wrong_number_of_an_own_accelerator(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_own_cluster(text)
    assert any(message in problem.message for problem in error.value.problems), error.value
