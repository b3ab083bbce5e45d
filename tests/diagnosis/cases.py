"""Define the faults of real runs and their correct diagnoses."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, NamedTuple

from jobs.core.verdict_schema import Cause

SQUARE = {"dp": 2, "tp": 2}
TRAIN: dict[str, Any] = {"steps": 100_000, "global_batch": 4, "seq_len": 64, "eval_every": 0, "verify": "off"}
Does = Literal["stop", "kill", "quota", "halting", "slow link", "cut link", ""]


class FaultCase(NamedTuple):
    """Fault with its correct diagnosis.

    Attributes:
        kind: Name of a fault of `tests.diagnosis.faulty`.
        does: Action on the process of the rank or on the network of its host.
        alarm: Kind of the alarm: a stall, a slow step, or an end.
        causes: Causes that are all correct.
        fixed: Ranks with the fault. Otherwise the seed draws one.
        everywhere: All ranks have the fault, and the diagnosis must name the `fixed` ones.
        hosts: With two hosts, the fault is on the link, and the diagnosis must name both hosts.
    """

    layout: dict[str, Any]
    alarm: Literal["hang", "straggler", "end"]
    causes: tuple[Cause, ...]
    kind: str = ""
    does: Does = ""
    seconds: float = 0.0
    train: dict[str, Any] = {}
    model: dict[str, Any] = {"preset": "gpt-tiny"}
    fixed: tuple[int, ...] = ()
    everywhere: bool = False
    hosts: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        product = 1
        for axis in ("dp", "pp", "tp", "cp"):
            product *= int(self.layout.get(axis, 1))
        return product

    def ranks(self, seed: int) -> list[int]:
        """Return the ranks with the fault."""
        return [] if self.hosts else list(self.fixed) or [self.draw(seed, self.world)]

    def draw(self, seed: int, of: int) -> int:
        """Return a number below `of`, different for consecutive seeds."""
        order = list(range(of))
        Random(self.kind or self.does).shuffle(order)
        return order[seed % of]

    def spec(self) -> dict[str, Any]:
        return {"model": self.model, "layout": self.layout, "train": {**TRAIN, **self.train}}


CASES: dict[str, FaultCase] = {
    "slow compute in one rank": FaultCase(SQUARE, "straggler", ("compute",), "slow_down_compute", seconds=0.3),
    "slow compute under zero 3": FaultCase(
        {"dp": 4, "zero": 3}, "straggler", ("compute",), "slow_down_compute", seconds=0.3
    ),
    "slow loader in one rank": FaultCase(SQUARE, "straggler", ("data",), "slow_down_loader", seconds=0.3),
    "one slow pipeline stage": FaultCase(
        {"pp": 4},
        "straggler",
        ("compute",),
        "slow_down_compute",
        seconds=0.2,
        train={"micro_batches": 4, "global_batch": 4},
    ),
    "a skewed router": FaultCase(
        {"dp": 2, "ep": 2},
        "straggler",
        ("experts",),
        "skew_router",
        model={"preset": "mixtral-tiny"},
        fixed=(0,),
        everywhere=True,
    ),
    "a CPU quota on one rank": FaultCase(SQUARE, "straggler", ("quota",), does="quota"),
    "a rank stopped again and again": FaultCase(SQUARE, "straggler", ("stopped",), does="halting"),
    "a stopped rank": FaultCase(SQUARE, "hang", ("stopped",), does="stop"),
    "a killed rank": FaultCase(SQUARE, "end", ("dead",), does="kill"),
    "a loader that hangs": FaultCase(SQUARE, "hang", ("data",), "block_loader"),
    "code that does not end": FaultCase(SQUARE, "hang", ("compute",), "loop_forever"),
    "code that does not end in a stage": FaultCase(
        {"pp": 4}, "hang", ("compute",), "loop_forever", train={"micro_batches": 4}
    ),
    "a skipped collective": FaultCase(SQUARE, "hang", ("skipped call",), "skip_call"),
    "another collective than the others": FaultCase(SQUARE, "hang", ("mismatch",), "replace_call"),
    "a checkpoint on a slow disk": FaultCase(
        SQUARE, "hang", ("checkpoint",), "slow_down_disk", seconds=60.0, train={"checkpoint_every": 10}
    ),
    "a link cut between two hosts": FaultCase(SQUARE, "hang", ("link",), does="cut link", hosts=("anna", "bert")),
    "a slow link between two hosts": FaultCase(
        SQUARE, "straggler", ("link",), does="slow link", hosts=("anna", "bert")
    ),
}

HEALTHY: dict[str, dict[str, Any]] = {
    "dp 2": {"layout": {"dp": 2}},
    "dp 4, zero 1": {"layout": {"dp": 4, "zero": 1}},
    "dp 4, zero 3": {"layout": {"dp": 4, "zero": 3}},
    "tp 2": {"layout": {"tp": 2}},
    "dp 2, tp 2, sequence parallel": {"layout": {**SQUARE, "sequence_parallel": True}},
    "pp 2, 1f1b": {"layout": {"pp": 2}, "train": {"micro_batches": 4}},
    "pp 4, gpipe": {"layout": {"pp": 4, "schedule": "gpipe"}, "train": {"micro_batches": 4}},
    "cp 2": {"layout": {"cp": 2}},
    "dp 2, ep 2": {"layout": {"dp": 2, "ep": 2}, "model": {"preset": "mixtral-tiny"}},
    "dp 2, checkpoints and validations": {"layout": {"dp": 2}, "train": {"checkpoint_every": 50, "eval_every": 20}},
}


def build_healthy_spec(name: str) -> dict[str, Any]:
    request = HEALTHY[name]
    return {
        "model": request.get("model", {"preset": "gpt-tiny"}),
        "layout": request["layout"],
        "train": {**TRAIN, **request.get("train", {})},
    }
