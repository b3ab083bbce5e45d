"""`python -m tests.diagnosis.faulty`: the trainer, in which one rank does something wrong from some step on.

What it does is read from fault.json below the data root. It takes the place of `workers.trainer` on a host of the
suite: all else of the run is what it always is.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from workers.meter.rank_exit import run_and_exit
from workers.trainer import trainer
from workers.trainer.__main__ import main
from workers.trainer.dataset import TokenDataset
from workers.trainer.model.moe import Router, Routing

FOREVER_S = 600.0


class Fault(TypedDict):
    """`kind` is a name in FAULTS. `ranks` have it, from the step after `after` on; `seconds`: how much of it."""

    kind: str
    ranks: list[int]
    after: int
    seconds: float


class Now:
    """The step that runs, from 1."""

    step = 0


def slow_compute(fault: Fault) -> None:
    """Each forward takes longer."""
    _before(trainer.BatchChunkRunner, "_forward", lambda: time.sleep(fault["seconds"]), fault)


def slow_loader(fault: Fault) -> None:
    """Each batch comes late."""
    _before(TokenDataset, "train_batch", lambda: time.sleep(fault["seconds"]), fault)


def stuck_loader(fault: Fault) -> None:
    """A batch does not come."""
    _before(TokenDataset, "_cut", lambda: time.sleep(FOREVER_S), fault)


def stuck_code(fault: Fault) -> None:
    """It computes something that does not end."""

    def never_ends() -> None:
        began = time.monotonic()
        while time.monotonic() - began < FOREVER_S:
            sum(range(10_000))

    _before(trainer.BatchChunkRunner, "_forward", never_ends, fault)


def skipped_call(fault: Fault) -> None:
    """It leaves the sum of norms and losses out, once."""
    original = trainer.Trainer.reduce_statistics

    def reduce_statistics(self: trainer.Trainer) -> torch.Tensor:
        if Now.step != fault["after"] + 1:
            return original(self)
        return torch.ones(2, dtype=torch.float64)

    trainer.Trainer.reduce_statistics = reduce_statistics  # type: ignore[method-assign]


def other_call(fault: Fault) -> None:
    """Where the others sum norms and losses, it gathers them."""
    original = trainer.Trainer.reduce_statistics

    def reduce_statistics(self: trainer.Trainer) -> torch.Tensor:
        if Now.step != fault["after"] + 1:
            return original(self)
        every = [torch.zeros(3) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.zeros(3))
        return torch.ones(2, dtype=torch.float64)

    trainer.Trainer.reduce_statistics = reduce_statistics  # type: ignore[method-assign]


def slow_disk(fault: Fault) -> None:
    """What it saves takes long to be written."""
    _before(FileSystemWriter, "write_data", lambda: time.sleep(fault["seconds"]), fault)


def skewed_router(fault: Fault) -> None:
    """All tokens go to the first experts, which the first rank of each group has. It is no rank's own: all do so."""
    original = Router.forward

    def route(self: Router, x: torch.Tensor) -> Routing:
        routing = original(self, x)
        if Now.step <= fault["after"]:
            return routing
        chosen = torch.arange(routing.experts.shape[-1], device=x.device).expand_as(routing.experts)
        return routing._replace(experts=chosen.contiguous())

    Router.forward = route  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Fault], None]] = {
    made.__name__: made
    for made in (
        slow_compute,
        slow_loader,
        stuck_loader,
        stuck_code,
        skipped_call,
        other_call,
        slow_disk,
        skewed_router,
    )
}


def _before(owner: Any, name: str, first: Callable[[], None], fault: Fault) -> None:
    """Do something before a method, once the fault is due."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if Now.step > fault["after"]:
            first()
        return original(*args, **kwargs)

    setattr(owner, name, method)


def _count_steps() -> None:
    original = trainer.Trainer.forward_backward

    def backward(self: trainer.Trainer, index: int) -> None:
        Now.step = index + 1
        original(self, index)

    trainer.Trainer.forward_backward = backward  # type: ignore[method-assign]


def start() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-root", type=Path, required=True)
    options, _ = parser.parse_known_args()
    fault = cast(Fault, json.loads((options.data_root / "fault.json").read_text()))
    _count_steps()
    if int(os.environ["RANK"]) in fault["ranks"] and fault["kind"] in FAULTS:
        FAULTS[fault["kind"]](fault)
    return main()


if __name__ == "__main__":
    run_and_exit(start)
