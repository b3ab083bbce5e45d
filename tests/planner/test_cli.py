"""Command line of the planner, without torch or Django."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.__main__ import main
from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_fields
from planner.facts.presets import TEMPLATES
from planner.hardware.catalog import CLUSTERS
from tests.support.processes import scale_timeout


def test_planner_imports_neither_torch_nor_django() -> None:
    code = "import planner.__main__, sys; print([m for m in ('torch', 'django', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_estimate_prints_memory_traffic_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "llama3-8b", "--dp", "8", "--zero", "3", "--global-batch", "64"]) == 0
    text = capsys.readouterr().out
    for words in ("8,030,261,248 parameters", "memory ", "dp of 8      all-gather", "MFU", "days for 1e12 tokens"):
        assert words in text


def test_estimate_prints_padding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "gpt2", "--tp", "4", "--dp", "7", "--zero", "2", "--global-batch", "7"]) == 0
    text = capsys.readouterr().out
    assert "124,439,808 parameters, vocabulary 50,257 padded to 50,688 for tp 4" in text
    assert "padding of uneven ZeRO shards adds 0.5%" in text
    assert main(["estimate", "--model", "llama3-8b", "--tp", "8", "--dp", "2", "--zero", "2"]) == 0
    assert "padded" not in capsys.readouterr().out


def test_search_prints_padding(capsys: pytest.CaptureFixture[str]) -> None:
    search = ["search", "--ranks", "4", "--global-batch", "8", "--pp", "1", "--zero", "0", "--recompute", "none"]
    assert main([*search, "--model", "gpt2"]) == 0
    assert "vocabulary 50,257 is padded to 50,432 for tp 2, 50,688 for tp 4" in capsys.readouterr().out
    assert main([*search, "--model", "gpt3-125m", "--tp", "1"]) == 0
    assert "padded" not in capsys.readouterr().out


def test_software_options_change_the_time_and_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Flags override options of the file and keep its other options."""
    flags = ["--dp", "8", "--ep", "8", "--zero", "1", "--global-batch", "8", "--stack", "megatron", "--json"]
    times = []
    for graphs in ("none", "whole"):
        asked = ["estimate", "--model", "mixtral-8x7b", "--cuda-graphs", graphs, "--overlap-experts", "true", *flags]
        assert main(asked) == 0
        times.append(json.loads(capsys.readouterr().out)["time"])
    assert times[1]["step_s"] < times[0]["step_s"]
    assert "CUDA graphs of whole layers or steps, overlapped expert communication" in times[1]["interval"]["words"]
    software = {"deterministic": True, "cuda_graphs": "router"}
    (tmp_path / "spec.json").write_text(
        json.dumps({"model": {"preset": "gpt-tiny"}, "resources": {"stack": "megatron", "software": software}})
    )
    assert main(["estimate", "--spec", str(tmp_path / "spec.json"), "--cluster", "h100", "--cuda-graphs", "whole"]) == 0
    assert "CUDA graphs of whole layers or steps, deterministic kernels" in capsys.readouterr().out


def test_stack_changes_the_time_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for stack in ("ours", "megatron"):
        flags = ["--dp", "8", "--zero", "1", "--global-batch", "64", "--stack", stack, "--json"]
        assert main(["estimate", "--model", "llama3-8b", *flags]) == 0
        times.append(json.loads(capsys.readouterr().out)["time"])
    assert times[0]["step_s"] != times[1]["step_s"]
    assert "Megatron with Transformer Engine" in times[1]["interval"]["words"]


def test_json_output_equals_the_printed_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "gpt2", "--dp", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["model_parameters"] == 124_439_808
    assert made["world_size"] == 2


def test_invalid_layout_is_rejected_with_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "gpt2", "--tp", "5", "--seq-len", "1024"]) == 2
    assert "`layout.tp` is 5, but 12 heads are not divisible by 5. Use 1, 2, 3, 4, 6 or 12." in capsys.readouterr().err


def test_search_ranks_layouts_and_explains_rejections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--model", "llama3-8b", "--ranks", "16", "--global-batch", "64", "--zero", "1"]) == 0
    text = capsys.readouterr().out
    assert "layouts considered" in text
    assert "layouts with one change from the first layout:" in text


def test_search_prints_only_the_requested_number_of_results(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--zero", "3", "--tp", "1", "--max-memory-gib", "24"]
    assert main(["search", "--model", "llama3-8b", "--ranks", "16", "--global-batch", "64", *asked]) == 0
    _, near = capsys.readouterr().out.split("layouts with one change from the first layout:\n")
    assert "GiB of 24.0" in near
    assert not any(change in near for change in ("ZeRO", "tp "))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("search", "--zero", "7"), "`layout.zero` is 7. Use at most 3."),
        (("search", "--recompute", "foo"), "`layout.recompute` is \"foo\". Use 'none', 'selective' or 'full'."),
        (("search", "--tp", "true"), "`layout.tp` is true. Use a whole number."),
        (("search", "--tp", "0"), "`layout.tp` is 0. Use at least 1."),
        (("search", "--tp", "abc"), '`layout.tp` is "abc". Use a whole number.'),
        (("search", "--dp-replicas", "2"), "`fixed.dp_replicas` is not supported. Use one of dp, pp, tp"),
        (("search", "--balance", "cost"), "`fixed.balance` is not supported"),
        (("search", "--micro-batches", "3"), "`fixed.micro_batches` is not supported"),
        (("auto", "--micro-batches", "3"), "`layout.auto.micro_batches` is not a known field"),
    ],
)
def test_invalid_flag_is_rejected_in_a_search(
    flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reject ZeRO 7 and degrees that cannot be fixed."""
    assert main([*flags, "--ranks", "2", "--model", "gpt-tiny", "--cluster", "cpu", "--seq-len", "64"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["estimate", "search", "auto", "explain"])
@pytest.mark.parametrize("section", ["train", "resources"])
def test_section_that_is_not_an_object_is_rejected(
    command: str, section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"model": {"preset": "gpt-tiny"}, section: None}))
    flags = ["--stack", "megatron", "--cuda-graphs", "whole"] + ["--ranks", "2"] * (command in ("search", "auto"))
    assert main([command, "--spec", str(tmp_path / "spec.json"), *flags]) == 2
    assert f"`{section}` is null. Use an object." in capsys.readouterr().err


def test_reads_spec_file_and_rejects_unreadable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "spec.json"
    good.write_text(json.dumps({"model": {"preset": "gpt-tiny"}}))
    assert main(["explain", "--spec", str(good)]) == 0
    assert "gradients" in capsys.readouterr().out
    assert main(["estimate", "--spec", str(tmp_path / "missing.json")]) == 2
    assert "--spec" in capsys.readouterr().err
    good.write_text("{")
    assert main(["estimate", "--spec", str(good)]) == 2
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--template", name]) == 0
    # Its gradients were sharded (2407.21783 section 3.3.2). With ZeRO-2, each micro-batch would pay for that.
    content = capsys.readouterr().out
    assert ("does not fit" in content or "might fit" in content) == (name == "llama3-405b-8k")


def test_closed_output_pipe_prints_no_error() -> None:
    command = [sys.executable, "-m", "planner", "explain", "--template", "zero3-7.5b", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=scale_timeout(60)) == 1
    process.stderr.close()


def test_memory_explanation_uses_the_requested_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--template", "llama3-405b-16k"]) == 0
    assert "memory  63.08 GiB of 79.1 GiB on the fullest rank" in capsys.readouterr().out
    assert main(["explain", "--template", "llama3-405b-16k"]) == 0
    assert "memory of a rank of stage 1 = 63.08 GiB  (estimated)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked",
    [
        ("--template", "gpt3-175b-megatron"),
        ("--model", "llama3-8b", "--pp", "2", "--dp", "4", "--micro-batches", "8", "--global-batch", "32"),
        ("--model", "gpt2", "--dp", "2", "--recompute", "full"),
    ],
)
def test_terms_of_explained_activations_add_up(asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The fullest moment does not hold all 16 layers of 303,300,608 B."""
    assert main(["explain", *asked, "--json"]) == 0
    memory = next(told for told in json.loads(capsys.readouterr().out) if told["figure"] == "memory")
    term = next(term for term in memory["terms"] if term["name"] == "activations")
    times, each, rest = (int(n.replace(",", "")) for n in re.split(r" x | \+ ", term["numbers"]))
    assert times * each + rest == term["value"]


@pytest.mark.parametrize(("ep", "words"), [("1", ""), ("8", ", fp32 weights of unsharded parameters")])
def test_expert_moments_outside_zero_shards_are_explained(
    ep: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO-1 shards all moments except those of experts that no other rank holds.

    The sum is 11.86 B per parameter.
    """
    layout = ["--dp", "8", "--ep", ep, "--zero", "1", "--global-batch", "8", "--cluster", "b300"]
    assert main(["explain", "--model", "mixtral-8x7b", *layout, "--json"]) == 0
    memory = next(told for told in json.loads(capsys.readouterr().out) if told["figure"] == "memory")
    term = next(term for term in memory["terms"] if term["name"] == "optimizer")
    assert term["formula"] == f"elements / shards x (Adam's moments{words})"
    numel, each = re.fullmatch(r"([\d,]+) per rank of 8 x ([\d.]+)", term["numbers"]).groups()  # type: ignore[union-attr]
    assert int(numel.replace(",", "")) * float(each) == pytest.approx(term["value"], rel=1e-3)


def test_mixture_is_planned_with_even_routing(capsys: pytest.CaptureFixture[str]) -> None:
    """Describe the trainer's settings as supported."""
    assert main(["estimate", "--model", "mixtral-tiny", "--dp", "2", "--ep", "2", "--seq-len", "64"]) == 0
    assert "step (exact except ep, which assumes evenly spread tokens" in capsys.readouterr().out
    assert main(["estimate", "--model", "deepseek-v3", "--dp", "8", "--global-batch", "8"]) == 0
    assert "step (estimate" in capsys.readouterr().out


def test_published_layout_that_does_not_fit_names_its_source() -> None:
    template = TEMPLATES["llama3-405b-8k"]
    spec, cluster = parse_fields(template.spec), CLUSTERS[template.cluster]
    sharded = spec.model_copy(update={"layout": spec.layout.model_copy(update={"zero": 2})})
    made, other = estimate(spec, cluster), estimate(sharded, cluster)
    assert (made["fits"], other["fits"]) == (False, True)
    assert 5.5 < (made["peak_memory_bytes"] - other["peak_memory_bytes"]) / 2**30 < 6.5
    assert "it sharded gradients as well, so its memory is up to 6 GiB less" in template.source


def test_bytes_of_several_calls_are_reported_as_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """53 all-reduces may differ in size. With 12 ranks on nodes of 8, all groups cross nodes."""
    assert main(["estimate", "--model", "gpt2", "--tp", "6", "--dp", "2", "--global-batch", "8"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"tp of 6 +all-reduce +53 calls +314.6 MB  between nodes", text)
    assert re.search(r"dp of 2 +all-reduce +3 calls +85.99 MB  between nodes", text)


def test_term_arithmetic_gives_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "gpt2"]) == 0
    told = re.search(
        r"optimizer +7.76 ms [^=]*= (\d+) x ([\d,]+) B at ([\d,]+) GB/s x ([\d.]+) \+ ([\d,]+) x ([\d.]+) us",
        capsys.readouterr().out,
    )
    assert told is not None
    moved, parameters, rate, share, tensors, each = (float(one.replace(",", "")) for one in told.groups())
    assert moved * parameters / (rate * 1e9 * share) + tensors * each * 1e-6 == pytest.approx(7.76e-3, rel=2e-3)
    mixture = ["--model", "mixtral-tiny", "--dp", "2", "--ep", "2", "--zero", "1", "--global-batch", "8"]
    assert main(["explain", *mixture, "--precision", "bf16"]) == 0
    assert "132,672 x 4 + 1,081,344 x 2" in capsys.readouterr().out


def test_utilization_does_not_exceed_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Where fp8 is emulated, matmuls that stay wide are faster."""
    asked = ["--model", "llama-tiny", "--cluster", "cpu", "--precision", "fp8", "--global-batch", "8"]
    assert main(["estimate", *asked, "--seq-len", "2048"]) == 0
    told = re.search(r"MFU ([\d.]+)%", capsys.readouterr().out)
    assert told is not None
    assert float(told[1]) < 100
