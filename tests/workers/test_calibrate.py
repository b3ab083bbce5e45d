"""A calibration with two ranks, and the step times of the planner from its profile."""

from __future__ import annotations

import os

import pytest
import torch

from planner.cost.timing import get_step_timing
from planner.facts.parse_spec import parse_fields
from planner.hardware.calibration import Calibration, build_cluster
from planner.hardware.profile import HostProfile
from tests.support.ranks import build_torchrun_command, run_to_completion
from workers.calibrate.measurements import _time_calls

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> HostProfile:
    out = tmp_path_factory.mktemp("calibration") / "profile.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = build_torchrun_command(2, "-m", "workers.calibrate", "--window", "0.005", "--out", str(out))
    done = run_to_completion(argv, environment)
    assert done.returncode == 0, done.stderr
    assert "measured in" in done.stdout
    return HostProfile.model_validate_json(out.read_text())


def test_measures_every_kind_with_one_and_all_ranks(profile: HostProfile) -> None:
    for points in (profile.gemm, profile.stream, profile.layers, profile.ends, profile.optimizer):
        assert {p.ranks for p in points} == {1, 2}
    assert {p.op for p in profile.collectives} == {
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"),
    }
    assert {p.precision for p in profile.gemm} == {"fp32", "bf16", "fp8"}
    assert {p.tp for p in profile.layers} == {1, 2}
    assert profile.slots == 2


def test_larger_work_takes_longer(profile: HostProfile) -> None:
    alone = sorted((2 * p.m * p.n * p.k, p.seconds) for p in profile.gemm if p.ranks == 1)
    assert alone[0][1] < alone[-1][1]
    layers = [p for p in profile.layers if p.ranks == 1 and p.arch == "gpt"]
    # Compare the smallest and the largest, because a busy machine may reverse the order of neighbors.
    seconds = {(p.hidden_size, p.micro_batch): p.forward_s + p.backward_s for p in layers}
    assert seconds[min(seconds)] < seconds[max(seconds)]


def test_planner_uses_the_profile(profile: HostProfile) -> None:
    cluster = build_cluster("here", profile)
    assert (cluster.basis, cluster.per_node) == ("calibrated", 2)
    found = Calibration(profile)
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 128}
    spec = parse_fields({"model": {"preset": "gpt-mini"}, "layout": {"tp": 2}, "train": train})
    layer = found.get_layer_seconds(spec, 2)
    assert layer is not None
    timed = get_step_timing(spec, cluster)
    ends = found.get_end_seconds(spec, 2)
    assert ends is not None
    whole = 8 * (layer.forward_s + layer.backward_s) + ends.forward_s + ends.backward_s
    assert 0 < timed.exposed_s["tp"] < timed.compute_s + timed.exposed_s["tp"] == pytest.approx(2 * whole)
    assert timed.step_s == pytest.approx(
        timed.compute_s + sum(timed.exposed_s.values()) + timed.launch_s + timed.bubble_s + timed.optimizer_s
    )


def test_idle_stages_make_other_stages_faster(profile: HostProfile) -> None:
    """A pipeline step takes longer than one stage, but less than with all ranks active."""
    cluster = build_cluster("here", profile)
    train = {"global_batch": 4, "micro_batches": 1, "seq_len": 128}
    spec = parse_fields({"model": {"preset": "gpt-mini"}, "layout": {"pp": 2}, "train": train})
    one = Calibration(profile).get_layer_seconds(spec, 1)
    assert one is not None
    timed = get_step_timing(spec, cluster)
    # One micro-batch: no two stages ever compute at once.
    assert timed.compute_s + timed.bubble_s > 8 * (one.forward_s + one.backward_s)
    assert timed.compute_s / (timed.compute_s + timed.bubble_s) == pytest.approx(0.5, abs=0.1)


def test_recompute_costs_time_on_a_calibrated_host(profile: HostProfile) -> None:
    cluster, train = build_cluster("here", profile), {"global_batch": 8, "seq_len": 128}
    stored, selective, full = (
        get_step_timing(
            parse_fields({"model": {"preset": "gpt-mini"}, "layout": {"recompute": r}, "train": train}), cluster
        )
        for r in ("none", "selective", "full")
    )
    assert stored.recompute_s == 0
    assert stored.step_s < selective.step_s < full.step_s
    assert full.recompute_s < full.compute_s


def test_unmeasured_shape_uses_measured_rates(profile: HostProfile) -> None:
    spec = parse_fields({"model": {"preset": "nanogpt"}, "train": {"global_batch": 2}})
    assert Calibration(profile).get_layer_seconds(spec, 1) is None
    assert get_step_timing(spec, build_cluster("here", profile)).step_s > 0


def test_synchronizes_once_after_consecutive_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronization per run would dominate a matmul of a few microseconds."""
    result: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: result.append("waited"))
    _time_calls(lambda: result.append("ran"), 3, torch.device("cuda"))
    assert result == ["ran", "ran", "ran", "waited"]
