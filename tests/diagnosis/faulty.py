"""Run the trainer with a fault on one rank after some step: `python -m tests.diagnosis.faulty`.

The fault is read from fault.json in the data root. The module replaces `workers.trainer` on a host of the tests.
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
    """A fault of FAULTS on `ranks`, from the step after `after` on. `seconds` is its size."""

    kind: str
    ranks: list[int]
    after: int
    seconds: float


class CurrentStep:
    """The running step, from 1."""

    step = 0


def slow_down_compute(fault: Fault) -> None:
    """Delay each forward."""
    _run_before(trainer.BatchChunkRunner, "forward", lambda: time.sleep(fault["seconds"]), fault)


def slow_down_loader(fault: Fault) -> None:
    """Delay each batch."""
    _run_before(TokenDataset, "train_batch", lambda: time.sleep(fault["seconds"]), fault)


def block_loader(fault: Fault) -> None:
    """Block the loader."""
    _run_before(TokenDataset, "_cut", lambda: time.sleep(FOREVER_S), fault)


def loop_forever(fault: Fault) -> None:
    """Run code that does not end."""

    def never_ends() -> None:
        began = time.monotonic()
        while time.monotonic() - began < FOREVER_S:
            sum(range(10_000))

    _run_before(trainer.BatchChunkRunner, "forward", never_ends, fault)


def skip_call(fault: Fault) -> None:
    """Omit the reduction of statistics once."""
    original = trainer.Trainer.reduce_statistics

    def reduce_statistics(self: trainer.Trainer) -> torch.Tensor:
        if CurrentStep.step != fault["after"] + 1:
            return original(self)
        return torch.ones(2, dtype=torch.float64)

    trainer.Trainer.reduce_statistics = reduce_statistics  # type: ignore[method-assign]


def replace_call(fault: Fault) -> None:
    """Gather statistics while other ranks reduce them."""
    original = trainer.Trainer.reduce_statistics

    def reduce_statistics(self: trainer.Trainer) -> torch.Tensor:
        if CurrentStep.step != fault["after"] + 1:
            return original(self)
        every = [torch.zeros(3) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.zeros(3))
        return torch.ones(2, dtype=torch.float64)

    trainer.Trainer.reduce_statistics = reduce_statistics  # type: ignore[method-assign]


def slow_down_disk(fault: Fault) -> None:
    """Delay the writes of a checkpoint."""
    _run_before(FileSystemWriter, "write_data", lambda: time.sleep(fault["seconds"]), fault)


def skew_router(fault: Fault) -> None:
    """Send all tokens to the first experts, which the first rank of each group has, on all ranks."""
    original = Router.forward

    def route(self: Router, x: torch.Tensor) -> Routing:
        routing = original(self, x)
        if CurrentStep.step <= fault["after"]:
            return routing
        chosen = torch.arange(routing.experts.shape[-1], device=x.device).expand_as(routing.experts)
        return routing._replace(experts=chosen.contiguous())

    Router.forward = route  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Fault], None]] = {
    made.__name__: made
    for made in (
        slow_down_compute,
        slow_down_loader,
        block_loader,
        loop_forever,
        skip_call,
        replace_call,
        slow_down_disk,
        skew_router,
    )
}


def _run_before(owner: Any, name: str, first: Callable[[], None], fault: Fault) -> None:
    """Run an action before a method when the fault is due."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if CurrentStep.step > fault["after"]:
            first()
        return original(*args, **kwargs)

    setattr(owner, name, method)


def _count_steps() -> None:
    original = trainer.Trainer.forward_backward

    def backward(self: trainer.Trainer, index: int) -> None:
        CurrentStep.step = index + 1
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
