"""Ranks on a CPU have their heap from jemalloc where the host has it, and hold what their tensors take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contracts.control import VERSION, LaunchOrder
from planner.cost.estimate import default_cluster, rank_memory
from planner.facts.parse_spec import parse_spec
from tests.support.host import host
from tests.support.processes import ROOT, RedisServer, base_environment
from workers.host import doctor
from workers.host.settings import HostSettings
from workers.host.start.claims import claim
from workers.host.start.heap import heap_variables, jemalloc
from workers.host.supervisor.training import Training


def _environment(folder: Path, kind: str, device: str) -> dict[str, str]:
    settings = HostSettings("", "here", 1, device, *(folder / name for name in "rdcs"), "workers.trainer")
    order = LaunchOrder(v=VERSION, job="job", attempt=1, spec={"kind": kind}, slots=[0])
    attempt = claim(settings.run_dir, order)
    assert attempt is not None
    return Training(attempt, order, settings, str(folder / "nobody-listens"))._environment()


@pytest.mark.parametrize(
    ("kind", "device", "ours"),
    [("train", "cpu", True), ("calibrate", "cpu", True), ("script", "cpu", False), ("train", "cuda", False)],
)
def test_what_a_rank_starts_with(tmp_path: Path, kind: str, device: str, ours: bool) -> None:
    """A script's heap is its own, and on a GPU tensors lie elsewhere."""
    environment, given = _environment(tmp_path, kind, device), heap_variables()
    assert jemalloc() is not None, "the tests' tools are not installed: make tools"
    assert {name: environment.get(name) for name in given} == (given if ours else dict.fromkeys(given))


def test_a_host_without_it_starts_ranks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.start.heap.jemalloc", lambda: None)
    assert "LD_PRELOAD" not in _environment(tmp_path, "train", "cpu")


def test_the_doctor_says_what_a_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._heap().level == "ok"
    monkeypatch.setattr(doctor, "jemalloc", lambda: None)
    found = doctor._heap()
    assert (found.level, found.advice) == ("warn", "apt-get install libjemalloc2, and restart the worker")


KEPT = """
from pathlib import Path
from workers.trainer.allocator import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
blocks = [bytearray(2**20) for _ in range(64)]
del blocks
print(resident() - before)
give_back()
print(resident() - before)
"""


def test_it_keeps_what_was_freed_until_it_is_told_to_give_it_back() -> None:
    """Of what is kept a step's next tensors are made without a page fault."""
    environment = {**base_environment(), **heap_variables()}
    argv = [sys.executable, "-c", KEPT]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kept, left = (int(line) / 2**20 for line in done.stdout.split())
    assert kept > 60
    assert left < 4


@pytest.mark.slow
def test_a_run_holds_what_was_planned(redis_service: RedisServer, tmp_path: Path) -> None:
    """In the C library's heap these tensors of 2 and 5.5 MiB took 1.4 to 1.5 times as much."""
    spec = parse_spec(
        {
            "model": {"preset": "llama-mini"},
            "layout": {"dp": 2},
            "train": {"global_batch": 16, "micro_batches": 2, "seq_len": 512, "steps": 3, "eval_every": 0},
        }
    )
    with host(redis_service, tmp_path / "host") as made, made.worker():
        made.order("held", spec=spec.model_dump(), expires_in_s=600)
        assert made.exit_of("held", 600)["outcome"] == "succeeded"
        peaks = [item["peak_bytes"] for item in made.items("held", "verdict")]
    parts = rank_memory(spec, 0, default_cluster(spec))
    planned = sum(parts.values()) - default_cluster(spec).accelerator.reserved_bytes
    assert len(peaks) == 2
    assert all(0.85 * planned < peak < 1.15 * planned for peak in peaks), (peaks, planned)
