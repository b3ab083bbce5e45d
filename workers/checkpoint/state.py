"""State of a trainer as boxes of whole tensors, for torch.distributed.checkpoint, with checksums of the tensors.

Each rank describes the box of each shard. Weights and Adam's moments are keyed by their names in the whole model.
Checksums do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from planner.facts.layout import Coordinates
from planner.facts.placements import TensorBox, get_local_box
from planner.facts.spec import JobSpec, ModelSpec
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.optimizer import make_step_count
from workers.trainer.parallel.parallelize import ModelShard, ShardedParameter, get_local
from workers.trainer.verification.replicas import compute_shard_id, get_model_tensor_name

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 2**18  # elements per block
INT_DTYPES = {2: torch.int16, 4: torch.int32}
CHECKSUM_FACTORS = (6364136223846793005, 2862933555777941757)  # odd, different per dimension (Knuth, Steele)
Sums = dict[str, int]


def get_model_state(spec: JobSpec, coordinates: Coordinates, model: ModelShard) -> BoxedState:
    """Return this rank's shards of all weights. A tied head has the name of the embedding."""
    return _make_boxes(spec, coordinates, model, "model", lambda parameter: get_local(parameter.master.detach()))


def get_optimizer_state(
    spec: JobSpec, coordinates: Coordinates, model: ModelShard, optimizer: torch.optim.Optimizer
) -> BoxedState:
    """Return this rank's shards of Adam's moments, and create missing moments."""
    state: BoxedState = {}
    for moment in MOMENTS:
        state |= _make_boxes(spec, coordinates, model, moment, partial(_get_moment, optimizer, moment))
    return state


def set_optimizer_steps(model: ModelShard, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set Adam's update counts."""
    for parameter in model.parameters:
        optimizer.state[parameter.master]["step"] = make_step_count(parameter.master, step)


def copy_tied_embedding(spec: JobSpec, model: ModelShard, optimizer: torch.optim.Optimizer) -> None:
    """Copy the loaded embedding to the tied head, if this rank has both ends of the pipeline."""
    by_name = {parameter.name: parameter.master for parameter in model.parameters}
    if not (spec.model.tied_embeddings and {"embedding.weight", "head.weight"} <= by_name.keys()):
        return
    embedding, head = by_name["embedding.weight"], by_name["head.weight"]
    with torch.no_grad():
        get_local(head).copy_(get_local(embedding))
        for moment in MOMENTS:
            get_local(optimizer.state[head][moment]).copy_(get_local(optimizer.state[embedding][moment]))


def _get_moment(optimizer: torch.optim.Optimizer, moment: str, parameter: ShardedParameter) -> torch.Tensor:
    state = optimizer.state[parameter.master]
    if moment not in state:
        state[moment] = torch.zeros_like(parameter.master, memory_format=torch.preserve_format)
    return get_local(state[moment])


def _make_boxes(
    spec: JobSpec,
    coordinates: Coordinates,
    model: ModelShard,
    prefix: str,
    get_tensor: Callable[[ShardedParameter], torch.Tensor],
) -> BoxedState:
    state: BoxedState = {}
    for parameter in model.parameters:
        name = get_model_tensor_name(parameter.name, spec.model)
        box = get_local_box(spec, coordinates, parameter.spec)
        tensor = get_tensor(parameter)
        if box.numel:
            state.setdefault(f"{prefix}.{name}", BoxedTensor(tensor[box.local_slices], box, parameter.spec.shape))
    return state


@dataclass(frozen=True)
class BoxedTensor:
    """Store this rank's part of a tensor of shape `whole`. `tensor` has the sizes of `box`."""

    tensor: torch.Tensor
    box: TensorBox
    whole: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


BoxedState = dict[str, BoxedTensor]


class BoxSavePlanner(DefaultSavePlanner):
    """Write boxes. A box with replicas is written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, boxed) for name, boxed in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor


class BoxLoadPlanner(DefaultLoadPlanner):
    """Read the boxes of this rank from boxes of any layout."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: BoxedState, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default implementation looks for DTensors, which boxes do not contain.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, boxed in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [boxed.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def _write_item(name: str, boxed: BoxedTensor) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, boxed.chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=boxed.chunk,
            properties=TensorProperties.create_from_tensor(boxed.tensor),
            size=torch.Size(boxed.whole),
        ),
    )


def compute_tensor_checksums(state: BoxedState, model: ModelSpec, group: dist.ProcessGroup | None) -> Sums:
    """Return the checksum of each tensor over all ranks. All ranks call this, and replicas count once."""
    names = [f"{kind}.{name}" for name, _ in iter_model_parameters(model) for kind in ("model", *MOMENTS)]
    numbers = {name: number for number, name in enumerate(names)}
    rows = [
        [numbers[name], compute_shard_id(name, boxed.box), compute_box_checksum(boxed)] for name, boxed in state.items()
    ]
    parts = {(number, part): found for number, part, found in _gather_rows(rows, group)}
    sums = [0] * len(numbers)
    for (number, _), found in parts.items():
        sums[number] += found
    return {name: _wrap_int64(total) for name, total in zip(numbers, sums, strict=True)}


def compute_box_checksum(boxed: BoxedTensor) -> int:
    """Return the sum of element bits times odd weights per position, modulo 2**64."""
    integers = boxed.tensor.detach().contiguous().view(INT_DTYPES[boxed.tensor.element_size()])
    weights_by_dim = [
        _make_weights(d, *span) for d, span in enumerate(zip(boxed.box.offsets, boxed.box.sizes, strict=True))
    ]
    rows = max(1, BLOCK // max(1, integers[0].numel()))
    total = 0
    for block, first in zip(torch.split(integers, rows), torch.split(weights_by_dim[0], rows), strict=True):
        found = block.to("cpu", torch.int64)
        for weights in reversed(weights_by_dim[1:]):
            found = (found * weights).sum(-1)
        total += int((found * first).sum())
    return _wrap_int64(total)


def _make_weights(dim: int, offset: int, size: int) -> torch.Tensor:
    factor = CHECKSUM_FACTORS[dim % len(CHECKSUM_FACTORS)]
    factors = (torch.arange(offset, offset + size) * len(CHECKSUM_FACTORS) + dim) * factor + dim
    return ((factors ^ (factors >> 29)) * CHECKSUM_FACTORS[0]) | 1


def _gather_rows(rows: list[list[int]], group: dist.ProcessGroup | None) -> list[list[int]]:
    if group is None:
        return rows
    count = torch.tensor([len(rows)])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    own = torch.full((int(count), 3), -1, dtype=torch.int64)
    own[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    tables = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(tables, own, group=group)
    all_rows: list[list[int]] = torch.cat(tables).tolist()
    return [row for row in all_rows if row[0] >= 0]


def _wrap_int64(total: int) -> int:
    """Return a number as signed 64-bit integer."""
    return (total + 2**63) % 2**64 - 2**63
