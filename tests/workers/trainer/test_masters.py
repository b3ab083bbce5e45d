"""What fp32 masters are for: small gradients add up, and small updates too."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.facts.reading.parse import parse_spec
from planner.facts.spec import JobSpec
from tests.parity.cases import SIZES, write_data
from tests.parity.rank import make_trainer
from workers.meter import Recorder
from workers.trainer.loop import Trainer
from workers.trainer.masters import MasterGradients, make_master


def test_small_gradients_are_not_lost_beside_a_large_sum() -> None:
    weight = nn.Parameter(torch.zeros(1))
    master = make_master(weight, torch.bfloat16)
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    masters = MasterGradients({weight: master}, splits=False)
    for gradient in (256.0, 0.5, 0.5, 0.5, 0.5):  # bf16 has 8 bits: 256.5 is 256 there
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert master.grad is not None
    assert master.grad.item() == 258.0
    held = weakref.ref(weight)
    del weight, master, masters
    gc.collect()
    assert held() is None, "of each look at a run by one process 6 B a parameter stayed"


def trainer_of(folder: Path, **train: Any) -> Trainer:
    settings = {"global_batch": 4, "micro_batches": 2, "seq_len": 32, "warmup_steps": 0, "data": "parity.bin", **train}
    spec: JobSpec = parse_spec({"model": SIZES["llama"], "train": settings})
    return make_trainer(spec, folder, Recorder(0))


@pytest.mark.parametrize("precision", ["bf16", "bf16_gradients"])
def test_updates_too_small_for_bf16_add_up_in_the_masters(precision: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    trainer = trainer_of(tmp_path, precision=precision, learning_rate=1e-6, weight_decay=0.0)
    (held,) = (held for held in trainer.part.tensors if held.name == "final_norm.weight")
    assert torch.equal(held.master, torch.ones_like(held.master))
    trainer.step(0)
    assert held.master.detach().sub(1).abs().max() == pytest.approx(1e-6, rel=0.1)
    assert torch.equal(held.tensor, torch.ones_like(held.tensor)), "less than bf16 can tell apart"
    assert all(torch.equal(h.tensor, h.master.bfloat16()) for h in trainer.part.tensors)
    assert all(h.tensor.grad is None and h.master.grad is None for h in trainer.part.tensors)


def test_everything_is_one_tensor_in_fp32(tmp_path: Path) -> None:
    write_data(tmp_path)
    tensors = trainer_of(tmp_path).part.tensors
    assert all(held.tensor is held.master is held.summed for held in tensors)


def test_everything_is_one_tensor_in_bf16_where_it_is_asked_for(tmp_path: Path) -> None:
    write_data(tmp_path)
    trainer = trainer_of(tmp_path, precision="bf16_state", learning_rate=1e-3)
    tensors = trainer.part.tensors
    assert all(held.tensor is held.master is held.summed for held in tensors)
    before = {held.name: held.tensor.clone() for held in tensors}
    trainer.step(0)
    assert {held.tensor.dtype for held in tensors} == {torch.bfloat16}
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.numel() > 1]
    assert len(moments) == 2 * len(tensors)
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    moved = {held.name for held in tensors if not torch.equal(held.tensor, before[held.name])}
    assert {held.name for held in tensors} - moved == {h.name for h in tensors if "norm" in h.name}, "ones stay ones"
