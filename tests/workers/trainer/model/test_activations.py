"""Autograd saves the bytes that the planner predicts for a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from planner.cost.memory import get_layer_bytes
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from workers.trainer.model import Block, Strategy
from workers.trainer.model.layers import compute_frequencies, compute_rotary


def make_spec_for(preset: str, batch: int, seq_len: int, recompute: str = "none", **train: str) -> JobSpec:
    sizes = {"global_batch": batch, "seq_len": seq_len, **train}
    return parse_fields({"model": {"preset": preset}, "layout": {"recompute": recompute}, "train": sizes})


class Made(TorchDispatchMode):
    """Record every storage that operations create, without a reference to it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                entry = StorageWeakRef(storage), tuple(tensor.shape), storage.nbytes()
                self.storages.setdefault(storage._cdata, entry)
        return out


def saved_bytes(spec: JobSpec) -> int:
    """Return the bytes that the backward of one block keeps."""
    dtype = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    strategy = Strategy(recompute=spec.layout.recompute, attention=spec.train.attention)
    block = Block(spec.model, strategy, moe=spec.model.moe is not None).to(dtype)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    # A weight cast to the compute type is the model's, not the micro-batch's.
    weights = {tuple(parameter.shape) for parameter in block.parameters()}
    shape = (spec.micro_batch_size, spec.train.seq_len, spec.model.hidden_size)
    leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
    gpt, device = spec.model.arch == "gpt", leaf.device
    turned = (
        None
        if gpt
        else compute_rotary(torch.arange(spec.train.seq_len), compute_frequencies(spec.model, device), dtype)
    )
    with Made() as made:
        out = block(leaf * 1, turned)
    own = out.untyped_storage()._cdata
    stored = [
        num_bytes
        for key, (storage, shape, num_bytes) in made.storages.items()
        if not storage.expired() and key != own and shape not in weights and shape[::-1] not in weights
    ]
    out.sum().backward()
    return sum(stored)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["gpt-tiny", "gpt-mini", "llama-tiny", "llama-mini"])
def test_a_layer_saves_the_predicted_bytes(preset: str, precision: str) -> None:
    spec = make_spec_for(preset, 3, 100, precision=precision)  # a shape no weight has
    assert saved_bytes(spec) == pytest.approx(get_layer_bytes(spec), rel=0.03)


@pytest.mark.parametrize("attention", ["fused", "unfused"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("preset", ["gpt-mini", "llama-mini"])
def test_recompute_saves_the_predicted_bytes(preset: str, recompute: str, attention: str) -> None:
    spec = make_spec_for(preset, 3, 100, recompute, attention=attention)
    assert saved_bytes(spec) == pytest.approx(get_layer_bytes(spec), rel=0.03)
    assert saved_bytes(spec) < saved_bytes(make_spec_for(preset, 3, 100, attention=attention))
