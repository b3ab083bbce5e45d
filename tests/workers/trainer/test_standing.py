"""What a rank counts of its memory, and what it does not claim to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contracts.telemetry.batches import Item
from contracts.telemetry.results import MemoryParts
from planner.cost.memory import gradient_bytes, memory
from planner.facts.reading.parse import parse_spec
from tests.parity.cases import SIZES, write_data
from tests.parity.rank import make_trainer
from workers.meter import Recorder
from workers.trainer.loop import train
from workers.trainer.peak import Peak
from workers.trainer.standing import Standing, storage_bytes

MODEL: dict[str, Any] = {**SIZES["llama"], "num_layers": 2, "vocab_size": 4096, "max_seq_len": 128}


def counted(folder: Path, copies: list[torch.Tensor], **settings: Any) -> tuple[MemoryParts, dict[str, int]]:
    """What the one rank of a run says; and its plan, with gradients as they are once complete."""
    write_data(folder)
    asked = {"steps": 2, "global_batch": 4, "micro_batches": 4, "seq_len": 128, "data": "parity.bin", **settings}
    spec = parse_spec({"model": MODEL, "train": {**asked, "verify": "off"}})
    trainer = make_trainer(spec, folder, Recorder(0))
    trainer.copies = lambda: copies
    said: list[Item] = []
    train(trainer, said.append, lambda _line: None, peak=Peak(trainer.device))
    (parts,) = [item["memory"] for item in said if item["kind"] == "verdict"]
    return parts, {**memory(spec, 0), "gradients": gradient_bytes(spec, 0)}


def test_tensors_that_share_a_storage_count_once() -> None:
    whole = torch.empty(8, 4)
    assert storage_bytes([whole, whole[0], whole.T, torch.empty(2)]) == 8 * 4 * 4 + 2 * 4


class Readings(Peak):
    """The most that each action in turn is told to have reached."""

    def __init__(self, *told: int) -> None:
        super().__init__(torch.device("cpu"))
        self.told = iter((0, *told))

    def read(self) -> int:
        return next(self.told)


def test_gradients_that_came_as_the_peak_passed_are_not_told_apart(tmp_path: Path) -> None:
    write_data(tmp_path)
    spec = parse_spec({"model": MODEL, "train": {"global_batch": 2, "seq_len": 32, "data": "parity.bin"}})
    part = make_trainer(spec, tmp_path, Recorder(0)).part
    held, largest = sum(held.tensor.nbytes for held in part.tensors), 2**30
    for highest, then, beside in (
        ((largest, 1), None, largest - held),
        ((1, largest), held, largest - 2 * held),
        ((1, 2), held, None),  # less than what was counted: a resident set may well say so
    ):
        standing = Standing(part, torch.optim.AdamW(part.masters()), Readings(*highest), tuple)
        with standing.within():
            for one in part.tensors:
                one.tensor.grad = torch.ones_like(one.tensor)
        with standing.within():
            standing.complete()
        told = standing.told()
        assert (told["gradients"], told["gradients_then"], told["beside"]) == (held, then, beside)
        for one in part.tensors:
            one.tensor.grad = None


def test_what_a_first_update_made_meanwhile_is_not_taken_from_its_peak(tmp_path: Path) -> None:
    parts, plan = counted(tmp_path, [], steps=1)
    assert parts["beside"] is None
    assert parts["optimizer"] == plan["optimizer"]


def test_of_gradients_that_an_update_turns_nobody_knows_how_many_stood(tmp_path: Path) -> None:
    write_data(tmp_path)
    train_spec = {"global_batch": 2, "seq_len": 32, "data": "parity.bin", "precision": "bf16_gradients"}
    part = make_trainer(parse_spec({"model": MODEL, "train": train_spec}), tmp_path, Recorder(0)).part
    standing = Standing(part, torch.optim.AdamW(part.masters()), Readings(1, 2**30), tuple)
    for one in part.tensors:
        one.tensor.grad = torch.ones_like(one.tensor)
    with standing.within():
        standing.complete()
    with standing.within():
        for one in part.tensors:
            one.tensor.grad = None
    told = standing.told()
    assert told["gradients_then"] is None
    assert told["beside"] == 2**30 - told["parameters"] - told["optimizer"]


def test_masters_and_copies_are_parts_of_their_own(tmp_path: Path) -> None:
    copies = [torch.empty(1000), torch.empty(10, device="meta")]
    parts, plan = counted(tmp_path, copies, precision="bf16_gradients")
    assert (parts["parameters"], parts["optimizer"], parts["gradients"]) == tuple(
        plan[name] for name in ("parameters", "optimizer", "gradients")
    )
    assert parts["copies"] == 4000, "those that lie elsewhere take nothing here"
