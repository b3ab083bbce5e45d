"""Runs ranks on hosts of their own and lays the kernel's bytes beside the meter's, as gloo would carry them."""

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
TIMEOUT_S = 300.0  # before our patience
TOLERANCE = 0.01
LAYOUTS = {
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "zero3 dp4": {"dp": 4, "zero": 3},
}


class Pair(NamedTuple):
    """One direction of one connection: bytes that `rank` sent `peer` for a group, by the model and by the kernel."""

    rank: int
    peer: int
    group: str
    modelled: int
    wire: int

    @property
    def ratio(self) -> float:
        """What the kernel sent over what the model says."""
        return self.wire / self.modelled if self.modelled else float("inf")


class Seen(NamedTuple):
    """One kind of work, CALLS times over: the directions that carried anything, or should have."""

    name: str
    hosts: int
    call_bytes: int
    pairs: list[Pair]

    @property
    def worst(self) -> Pair:
        """The direction furthest from its model; of those as far, the busiest."""
        return max(self.pairs, key=lambda pair: (abs(pair.ratio - 1), pair.modelled))

    @property
    def exact(self) -> int:
        """Directions that agree to the byte."""
        return sum(pair.wire == pair.modelled for pair in self.pairs)

    @property
    def passed(self) -> bool:
        """Whether every direction carried what the model says, within TOLERANCE and with no bytes let off."""
        return abs(self.worst.ratio - 1) <= TOLERANCE


def primitives(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, Any]:
    """Each collective on each group, at about each size in bytes."""
    return {"name": "primitives", "groups": groups, "sizes": sizes}


def training(name: str) -> dict[str, Any]:
    """Steps of a small GPT in one of LAYOUTS."""
    model = {**SIZES["gpt"], "hidden_size": 256, "ffn_hidden_size": 1024}
    train = {"global_batch": 4, "seq_len": 32, "steps": 100, "warmup_steps": 1, "eval_every": 0, "data": DATA}
    spec = parse_spec({"model": model, "layout": LAYOUTS[name], "train": train})
    return {"name": name, "spec": spec.model_dump(mode="json")}


def watch(asked: Sequence[dict[str, Any]], folder: Path) -> list[Seen]:
    """What is asked for, in turn, by one rank on each of HOSTS hosts."""
    folder.mkdir(parents=True)
    write_data(folder)
    with hosts(HOSTS) as made:
        ranks = [_start(host, rank, made[0].address, folder, asked) for rank, host in enumerate(made)]
        try:
            wait_until(lambda: _ended(ranks, folder), "ranks that have ended", timeout_s=TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        rank_at = {host.address: rank for rank, host in enumerate(made)}
    said = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(HOSTS)]
    return [_seen(by_rank, rank_at) for by_rank in zip(*said, strict=True)]


def _ended(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> bool:
    """Whether all are done; one that failed leaves the others waiting, so what they said is raised at once."""
    codes = [process.poll() for process in ranks]
    said = [(folder / f"errors-{rank}").read_text()[-4000:] for rank in range(len(ranks)) if codes[rank]]
    assert not said, "\n".join(said)
    return all(code == 0 for code in codes)


def _start(
    host: NetHost, rank: int, master: str, folder: Path, asked: Sequence[dict[str, Any]]
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
    argv = host.inside([sys.executable, "-m", "tests.witness.rank", str(folder), json.dumps(asked)])
    with (folder / f"errors-{rank}").open("wb") as errors:
        return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _seen(by_rank: Sequence[dict[str, Any]], rank_at: dict[str, int]) -> Seen:
    pairs = [pair for rank, said in enumerate(by_rank) for pair in _pairs(rank, said, rank_at)]
    first = by_rank[0]
    return Seen(first["name"], first["hosts"], first["call_bytes"], pairs)


def _pairs(rank: int, said: dict[str, Any], rank_at: dict[str, int]) -> list[Pair]:
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
            found.append(Pair(rank, peer, group, modelled[group, peer], wire))
    return found
