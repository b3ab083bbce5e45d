"""A dry run counts the traffic, memory and FLOPs of the trainer at any scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.cost.memory import get_gradient_bytes, get_memory
from planner.facts.model_shapes import compute_model_flops
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from planner.hardware.stacks import compute_hardware_flops
from tests.parity.cases import Case, core_cases
from tests.parity.compare import run_specs
from tests.support.tiers import extend_after
from workers.dry_run import DryStep, main, run_dry_step
from workers.trainer.model import Decoder, Strategy
from workers.trainer.traffic_check import compare_step_traffic

ROOT = Path(__file__).resolve().parents[2]
KEPT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "alone": ("gpt-mini", {}, {}),
    "alone, one micro-batch": ("llama-mini", {}, {"micro_batches": 1}),
    "replicas": ("llama-mini", {"dp": 2}, {}),
    "replicas, few tokens": ("gpt-mini", {"dp": 2}, {"seq_len": 32}),
    "zero1": ("gpt-mini", {"dp": 4, "zero": 1}, {}),
    "zero2": ("llama-mini", {"dp": 2, "zero": 2}, {}),
    "zero3": ("gpt-mini", {"dp": 2, "zero": 3}, {}),
    "tp2 sp": ("llama-mini", {"tp": 2, "sequence_parallel": True}, {}),
    "pp2": ("gpt-mini", {"pp": 2}, {}),
    "full recompute": ("llama-mini", {"recompute": "full"}, {}),
    "bf16": ("gpt-mini", {}, {"precision": "bf16"}),
    "bf16 zero2": ("gpt-mini", {"dp": 2, "zero": 2}, {"precision": "bf16"}),
    "bf16 gradients, replicas": ("gpt-mini", {"dp": 2}, {"precision": "bf16_gradients"}),
}
BY_PART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masters apart": ({"tp": 2, "pp": 2}, {"precision": "bf16"}),
    "gradients turned": ({}, {"precision": "bf16_gradients"}),
    "shards": ({"dp": 2, "zero": 3}, {"precision": "bf16"}),
    "a split backward": ({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"precision": "bf16_state"}),
}


def wrong(spec: JobSpec, step: DryStep) -> list[Any]:
    rows = compare_step_traffic(spec, step.rank, step.cells, {"step": step.received_rows})
    assert rows
    return [
        row
        for row in rows
        if (row["measured_bytes"], row["measured_count"]) != (row["predicted_bytes"], row["predicted_count"])
    ]


@pytest.mark.parametrize("case", extend_after(2, core_cases()[::8][::-1]), ids=lambda case: case.label)
def test_last_rank_matches_predicted_traffic(case: Case) -> None:
    assert wrong(case.spec, run_dry_step(case.spec, case.spec.layout.world_size - 1)) == []


@pytest.mark.slow
def test_dry_run_equals_real_run(tmp_path: Path) -> None:
    names = (("gpt", "pp2 zbv x zero2 dp2"), ("llama", "cp2 all-gather x tp2 sp"))
    cases = [Case(*name) for name in names]
    runs = run_specs({case.label: case.spec for case in cases}, tmp_path)
    for case in cases:
        steps = case.spec.train.steps
        for rank, cells in enumerate(runs[case.label].cells):
            real = {
                (c["op"], c["axis"]): (c["count"], c["payload_bytes"], c["algorithmic_bytes"])
                for c in cells
                if c["phase"] == "step"
            }
            dry = {
                (c["op"], c["axis"]): (steps * c["count"], steps * c["payload_bytes"], steps * c["algorithmic_bytes"])
                for c in run_dry_step(case.spec, rank).cells
            }
            assert dry == real


@pytest.mark.slow
def test_rank_of_16384_matches_predicted_traffic() -> None:
    layout = {"tp": 8, "pp": 16, "dp": 128, "zero": 2, "sequence_parallel": True}
    train = {"global_batch": 2048, "micro_batches": 16, "seq_len": 8192, "precision": "bf16"}
    spec = parse_fields({"model": {"preset": "llama3-405b"}, "layout": layout, "train": train})
    step = run_dry_step(spec, 16383)
    assert wrong(spec, step) == []
    assert step.parameters == pytest.approx(405e9 / 128 / 128, rel=0.15)


def test_counts_flops_as_pytorch_does() -> None:
    spec = parse_fields({"model": {"preset": "gpt-tiny"}, "train": {"global_batch": 2, "seq_len": 64}})
    model, tokens = spec.model, 2 * 64
    h, f, layers = model.hidden_size, model.ffn_hidden_size, model.num_layers
    products = 2 * tokens * (layers * (4 * h * h + 2 * h * f) + h * model.vocab_size)
    scores = layers * 2 * 2 * tokens * 64 * h
    # Backward computes each matmul twice, and attention recomputes its scores.
    assert run_dry_step(spec, 0).flops == 3 * products + scores + scores * 5 // 2


@pytest.mark.parametrize("preset", ["gpt-tiny", "mixtral-tiny"])
def test_recomputes_layer_only_as_far_as_backward_needs(preset: str) -> None:
    """The gradient of a router needs the last matmuls of its experts."""
    model = {"preset": preset, "num_layers": 2}
    train = {"global_batch": 2, "seq_len": 64}
    request = {"model": model, "train": train}
    once, again = (parse_fields({**request, "layout": {"recompute": how}}) for how in ("none", "full"))
    assert run_dry_step(again, 0).flops - run_dry_step(once, 0).flops == compute_hardware_flops(
        again
    ) - compute_hardware_flops(once)


def test_total_flops_do_not_depend_on_layout() -> None:
    train = {"global_batch": 2, "seq_len": 64}
    specs = [parse_fields({"model": {"preset": "llama-tiny"}, "layout": {"tp": n}, "train": train}) for n in (1, 2)]
    alone, divided = (sum(run_dry_step(s, rank).flops for rank in range(s.layout.world_size)) for s in specs)
    assert alone == divided


@pytest.mark.parametrize("factor", extend_after(1, [0.25, 1.0, 4.0]))
def test_counts_flops_of_full_capacity_buffers(factor: float) -> None:
    """A dry run also counts attention scores, which backward recomputes. A low capacity reduces model FLOPs."""
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 352, "capacity_factor": factor}
    train = {"global_batch": 2, "seq_len": 64}
    spec = parse_fields({"model": {"preset": "mixtral-tiny", "moe": moe}, "train": train})
    again = spec.model.num_layers * 2 * 2 * 64 * 64 * spec.model.hidden_size
    assert run_dry_step(spec, 0).flops - again == compute_hardware_flops(spec)
    assert compute_model_flops(spec) == min(
        compute_hardware_flops(spec), compute_model_flops(_with_capacity(spec, 1.0))
    )


def _with_capacity(spec: JobSpec, factor: float) -> JobSpec:
    assert spec.model.moe is not None
    moe = spec.model.moe.model_copy(update={"capacity_factor": factor})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"moe": moe})})


@pytest.mark.parametrize("name", extend_after(3, list(KEPT)[::3] + list(KEPT)[1::3] + list(KEPT)[2::3]))
def test_peak_matches_predicted_memory(name: str) -> None:
    preset, layout, train = KEPT[name]
    sizes = {"global_batch": 8, "micro_batches": 2, "seq_len": 256, **train}
    spec = parse_fields({"model": {"preset": preset, "num_layers": 4}, "layout": layout, "train": sizes})
    step = run_dry_step(spec, 0)
    assert sum(get_memory(spec, 0).values()) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.025)


def test_single_rank_holds_weights_gradients_and_moments() -> None:
    spec = parse_fields({"model": {"preset": "gpt-mini"}, "train": {"global_batch": 4, "seq_len": 128}})
    whole = sum(p.numel() * p.element_size() for p in _parameters(spec))
    step = run_dry_step(spec, 0)
    assert step.peak_bytes > 2 * whole, "weights and gradients"
    assert step.optimizer_bytes == 2 * whole


@pytest.mark.parametrize("name", extend_after(2, list(BY_PART)[::-1]))
def test_memory_parts_equal_those_of_a_run(name: str) -> None:
    layout, train = BY_PART[name]
    sizes = {"global_batch": 4, "micro_batches": 2, "seq_len": 64, **train}
    spec = parse_fields({"model": {"preset": "gpt-tiny"}, "layout": layout, "train": sizes})
    step, plan = run_dry_step(spec, 0), get_memory(spec, 0)
    result = step.memory
    assert (result["parameters"], result["optimizer"]) == (plan["parameters"], plan["optimizer"])
    assert result["gradients"] == get_gradient_bytes(spec, 0)
    assert result["beside"] is not None, "no update is the first"
    counted = result["parameters"] + result["optimizer"] + (result["gradients_then"] or 0)
    assert counted + result["beside"] == step.peak_bytes + step.optimizer_bytes


def _parameters(spec: JobSpec) -> list[torch.nn.Parameter]:
    with torch.device("meta"):
        decoder = Decoder(spec.model, range(spec.model.num_layers), Strategy(), torch.float32, first=True, last=True)
    return list(decoder.parameters())


def test_command_prints_rank_and_exits_with_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}}))
    command = [sys.executable, "-m", "workers.dry_run", "--spec", str(spec)]
    result = subprocess.run([*command, "--ranks", "3", "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["rank"], found["kind"]) == (3, "dry_run")
    assert all(row["measured_bytes"] == row["predicted_bytes"] for row in found["collectives"])
    assert found["memory"]["parameters"] * 3 == found["memory"]["parameters"] + found["memory"]["optimizer"]
    monkeypatch.setattr(sys, "argv", [*command[2:], "--ranks", "0,1"])
    assert main() == 0
    assert capsys.readouterr().out.count("as predicted") > 2
    monkeypatch.setattr(sys, "argv", [*command[2:], "--ranks", "4"])
    assert main() == 2
    assert capsys.readouterr().err == (
        "error: `dry_ranks` contains 4, but dp 2 x pp 1 x tp 2 = 4 ranks. Use ranks from 0 to 3.\n"
    )
