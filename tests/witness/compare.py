"""Run ranks on separate hosts, and compare the bytes of the kernel with those of the meter under gloo's algorithms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.parse_spec import parse_spec
from tests.parity.cases import DATA, SIZES, write_data
from tests.support.gloo_messages import gloo_bytes
from tests.support.processes import wait_until
from tests.witness.network import NetHost, hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = 29411
HOSTS = 4
TIMEOUT_S = 300.0  # shorter than the test's own timeout
TOLERANCE = 0.01
LAYOUTS = {
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "zero3 dp4": {"dp": 4, "zero": 3},
}


class ConnectionComparison(NamedTuple):
    """One direction of a connection: bytes from `rank` to `peer` for a group, by the model and by the kernel."""

    rank: int
    peer: int
    group: str
    modelled: int
    wire: int

    @property
    def ratio(self) -> float:
        """Bytes of the kernel over bytes of the model."""
        return self.wire / self.modelled if self.modelled else float("inf")


class WorkComparison(NamedTuple):
    """Compare directions with expected or measured traffic, for CALLS repetitions of one kind of work."""

    name: str
    hosts: int
    call_bytes: int
    pairs: list[ConnectionComparison]

    @property
    def worst(self) -> ConnectionComparison:
        """Direction with the largest error. Among equal errors, the one with most bytes."""
        return max(self.pairs, key=lambda pair: (abs(pair.ratio - 1), pair.modelled))

    @property
    def exact(self) -> int:
        """Directions without a difference."""
        return sum(pair.wire == pair.modelled for pair in self.pairs)

    @property
    def passed(self) -> bool:
        """Return True if the error of each direction is within TOLERANCE, without retransmitted bytes."""
        return abs(self.worst.ratio - 1) <= TOLERANCE


def list_primitive_requests(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, Any]:
    """Request each collective on each group with about each size in bytes."""
    return {"name": "primitives", "groups": groups, "sizes": sizes}


def build_training_request(name: str) -> dict[str, Any]:
    """Request steps of a small GPT with a layout of LAYOUTS."""
    model = {**SIZES["gpt"], "hidden_size": 256, "ffn_hidden_size": 1024}
    train = {"global_batch": 4, "seq_len": 32, "steps": 100, "warmup_steps": 1, "eval_every": 0, "data": DATA}
    spec = parse_spec({"model": model, "layout": LAYOUTS[name], "train": train})
    return {"name": name, "spec": spec.model_dump(mode="json")}


def run_requests(request: Sequence[dict[str, Any]], folder: Path) -> list[WorkComparison]:
    """Run the requests in order on HOSTS hosts with one rank each."""
    folder.mkdir(parents=True)
    write_data(folder)
    with hosts(HOSTS) as made:
        ranks = [_start_rank(host, rank, made[0].address, folder, request) for rank, host in enumerate(made)]
        try:
            wait_until(lambda: _has_ended(ranks, folder), "ranks that have ended", timeout_s=TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        rank_at = {host.address: rank for rank, host in enumerate(made)}
    output = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(HOSTS)]
    return [_compare_work(by_rank, rank_at) for by_rank in zip(*output, strict=True)]


def _has_ended(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> bool:
    """Return True if all ranks have ended. Raise the output of one that failed, because the others wait for it."""
    codes = [process.poll() for process in ranks]
    output = [(folder / f"errors-{rank}").read_text()[-4000:] for rank in range(len(ranks)) if codes[rank]]
    assert not output, "\n".join(output)
    return all(code == 0 for code in codes)


def _start_rank(
    host: NetHost, rank: int, master: str, folder: Path, request: Sequence[dict[str, Any]]
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(HOSTS),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    argv = host.inside([sys.executable, "-m", "tests.witness.rank", str(folder), json.dumps(request)])
    with (folder / f"errors-{rank}").open("wb") as errors:
        return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _compare_work(by_rank: Sequence[dict[str, Any]], rank_at: dict[str, int]) -> WorkComparison:
    pairs = [pair for rank, output in enumerate(by_rank) for pair in _compare_connections(rank, output, rank_at)]
    first = by_rank[0]
    return WorkComparison(first["name"], first["hosts"], first["call_bytes"], pairs)


def _compare_connections(rank: int, said: dict[str, Any], rank_at: dict[str, int]) -> list[ConnectionComparison]:
    members = {group: members for group, members, *_ in said["wire"]}
    modelled: defaultdict[tuple[str, int], int] = defaultdict(int)
    for op, group, payload in said["metered"]:
        element = 8 if group == said["doubles"] else 4
        for peer, sent in gloo_bytes(op, payload, members[group], rank, said["root"], element).items():
            modelled[group, peer] += sent
    found = []
    for group, _, address, wire in said["wire"]:
        peer = rank_at[address.rsplit(":", 1)[0]]
        if wire or modelled[group, peer]:
            found.append(ConnectionComparison(rank, peer, group, modelled[group, peer], wire))
    return found
