"""What the planner says a layer keeps is what autograd really keeps."""

from __future__ import annotations

import pytest
import torch

from planner.activations import layer_activation_bytes
from planner.parse import parse_fields
from planner.spec import JobSpec
from workers.trainer.model import Block
from workers.trainer.tensor_parallel import TensorParallel


def spec_of(preset: str, precision: str, batch: int, seq_len: int) -> JobSpec:
    train = {"global_batch": batch, "seq_len": seq_len, "precision": precision}
    return parse_fields({"model": {"preset": preset}, "train": train})


def saved_bytes(spec: JobSpec) -> int:
    """Bytes of the distinct storages that backward of one block keeps, parameters and masks of the input apart."""
    dtype = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    block = Block(spec.model, TensorParallel(None))
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    # A weight cast to the compute type is the model's, not the micro-batch's.
    weights = {tuple(parameter.shape) for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        is_weight = tuple(tensor.shape) in weights or tuple(tensor.shape[::-1]) in weights
        if pointer not in own and not is_weight:
            kept[pointer] = tensor.untyped_storage().nbytes()
        held.append(tensor)  # so that no address is used twice
        return tensor

    held: list[torch.Tensor] = []
    shape = (spec.micro_batch_size, spec.train.seq_len, spec.model.hidden_size)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    out.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["gpt-tiny", "gpt-mini", "llama-tiny", "llama-mini"])
def test_a_layer_keeps_what_the_planner_counts(preset: str, precision: str) -> None:
    spec = spec_of(preset, precision, 3, 100)  # a shape no weight has
    assert saved_bytes(spec) == pytest.approx(layer_activation_bytes(spec), rel=0.03)
