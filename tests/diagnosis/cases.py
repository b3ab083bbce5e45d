"""What is done to real runs, and what must be said of it."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, NamedTuple

from jobs.core.verdict_schema import Cause

SQUARE = {"dp": 2, "tp": 2}
TRAIN: dict[str, Any] = {"steps": 100_000, "global_batch": 4, "seq_len": 64, "eval_every": 0, "verify": "off"}
Does = Literal["stop", "kill", "quota", "halting", "slow link", "cut link", ""]


class Case(NamedTuple):
    """A fault. `kind` is one that `tests.diagnosis.faulty` has, or `does` what is done to the rank's process or its
    host's network from outside. `told`: whether it must be named as a standstill, as what slows every step, or as an
    end; `causes`: any of these is right. A rank drawn by seed has it, or `fixed` ones; `everywhere`: all do it, those
    must be named. With two `hosts` it is between them, at the end of the one drawn by seed: both must be named."""

    layout: dict[str, Any]
    told: Literal["hang", "straggler", "end"]
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
        """Who has it."""
        return [] if self.hosts else list(self.fixed) or [self.drawn(seed, self.world)]

    def drawn(self, seed: int, of: int) -> int:
        """One of so many: another with each of as many seeds as there are, in an order of its own."""
        order = list(range(of))
        Random(self.kind or self.does).shuffle(order)
        return order[seed % of]

    def spec(self) -> dict[str, Any]:
        return {"model": self.model, "layout": self.layout, "train": {**TRAIN, **self.train}}


CASES: dict[str, Case] = {
    "slow compute in one rank": Case(SQUARE, "straggler", ("compute",), "slow_compute", seconds=0.3),
    "slow compute under zero 3": Case({"dp": 4, "zero": 3}, "straggler", ("compute",), "slow_compute", seconds=0.3),
    "slow loader in one rank": Case(SQUARE, "straggler", ("data",), "slow_loader", seconds=0.3),
    "one slow pipeline stage": Case(
        {"pp": 4},
        "straggler",
        ("compute",),
        "slow_compute",
        seconds=0.2,
        train={"micro_batches": 4, "global_batch": 4},
    ),
    "a skewed router": Case(
        {"dp": 2, "ep": 2},
        "straggler",
        ("experts",),
        "skewed_router",
        model={"preset": "mixtral-tiny"},
        fixed=(0,),
        everywhere=True,
    ),
    "a CPU quota on one rank": Case(SQUARE, "straggler", ("quota",), does="quota"),
    "a rank stopped again and again": Case(SQUARE, "straggler", ("stopped",), does="halting"),
    "a stopped rank": Case(SQUARE, "hang", ("stopped",), does="stop"),
    "a killed rank": Case(SQUARE, "end", ("dead",), does="kill"),
    "a loader that hangs": Case(SQUARE, "hang", ("data",), "stuck_loader"),
    "code that does not end": Case(SQUARE, "hang", ("compute",), "stuck_code"),
    "code that does not end in a stage": Case(
        {"pp": 4}, "hang", ("compute",), "stuck_code", train={"micro_batches": 4}
    ),
    "a skipped collective": Case(SQUARE, "hang", ("skipped call",), "skipped_call"),
    "another collective than the others": Case(SQUARE, "hang", ("mismatch",), "other_call"),
    "a checkpoint on a slow disk": Case(
        SQUARE, "hang", ("checkpoint",), "slow_disk", seconds=60.0, train={"checkpoint_every": 10}
    ),
    "a link cut between two hosts": Case(SQUARE, "hang", ("link",), does="cut link", hosts=("anna", "bert")),
    "a slow link between two hosts": Case(SQUARE, "straggler", ("link",), does="slow link", hosts=("anna", "bert")),
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


def healthy_spec(name: str) -> dict[str, Any]:
    asked = HEALTHY[name]
    return {
        "model": asked.get("model", {"preset": "gpt-tiny"}),
        "layout": asked["layout"],
        "train": {**TRAIN, **asked.get("train", {})},
    }
