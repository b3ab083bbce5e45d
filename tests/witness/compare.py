"""Runs ranks on hosts of their own and lays the kernel's bytes beside the meter's, as gloo would carry them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from planner.parse import parse_spec
from planner.spec import JobSpec
from planner.wire import gloo_bytes
from tests.parity.cases import SIZES
from tests.support.network import NetHost, hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = 29411
TOLERANCE = 0.01
TRAINED = {
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "zero3 dp2": {"dp": 2, "zero": 3},
}


class Seen(NamedTuple):
    """One kind of work on `hosts` hosts. Bytes sent by all ranks, and by each."""

    name: str
    hosts: int
    payload_bytes: int
    modelled: list[float]
    wire: list[int]

    @property
    def ratio(self) -> float:
        """What the kernel sent over what the model says."""
        return sum(self.wire) / sum(self.modelled)

    @property
    def passed(self) -> bool:
        return abs(self.ratio - 1) < TOLERANCE


def training_spec(layout: dict[str, Any]) -> JobSpec:
    """Large enough that headers do not count."""
    model = {**SIZES["gpt"], "hidden_size": 256, "ffn_hidden_size": 1024, "max_seq_len": 256}
    train = {"global_batch": 4, "micro_batches": 1, "seq_len": 256, "steps": 100, "warmup_steps": 1, "eval_every": 0}
    return parse_spec({"model": model, "layout": layout, "train": train})


def watch(count: int, folder: Path, spec: JobSpec | None = None) -> list[Seen]:
    """Every primitive on `count` hosts, or a training run."""
    folder.mkdir(parents=True)
    with hosts(count) as made:
        ranks = [_start(host, rank, count, made[0].address, folder, spec) for rank, host in enumerate(made)]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, f"rank {rank}: {errors[-4000:]}"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    said = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]
    return [_seen(name, [s[name] for s in said]) for name in said[0]]


def _start(
    host: NetHost, rank: int, world: int, master: str, folder: Path, spec: JobSpec | None
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    content = "null" if spec is None else spec.model_dump_json()
    argv = host.inside([sys.executable, "-m", "tests.witness.rank", str(folder), content])
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _seen(name: str, by_rank: list[dict[str, Any]]) -> Seen:
    modelled, wire, payload = [], [], 0
    for said in by_rank:
        modelled.append(sum(gloo_bytes(op, size, group) for op, _, group, _, size in said["metered"]))
        wire.append(sum(said["wire"].values()))
        payload += sum(size for *_, size in said["metered"])
    return Seen(name, len(by_rank), payload, modelled, wire)
