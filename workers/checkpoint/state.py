"""A trainer's state as boxes: weights and Adam's moments, by the names of the whole model.

Boxes of whole tensors for torch.distributed.checkpoint: each rank says where its part lies, DCP does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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
from planner.facts.spec import JobSpec
from workers.trainer.optimizer import updates_made
from workers.trainer.parallel.parallelize import Held, Part, local

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_state(spec: JobSpec, place: Coordinates, part: Part) -> State:
    """This rank's part of every weight. A table tied to the embedding has the embedding's name."""
    return _boxes(spec, place, part, "model", lambda held: local(held.master.detach()))


def optimizer_state(spec: JobSpec, place: Coordinates, part: Part, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part of Adam's moments, made if there were none yet."""
    found: State = {}
    for moment in MOMENTS:
        found |= _boxes(spec, place, part, moment, partial(_moment, optimizer, moment))
    return found


def set_steps(part: Part, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell Adam how many updates it has made."""
    for held in part.tensors:
        optimizer.state[held.master]["step"] = updates_made(held.master, step)


def copy_tied(spec: JobSpec, part: Part, optimizer: torch.optim.Optimizer) -> None:
    """Where both ends of a pipe are here, the head takes what was loaded for the embedding."""
    by_name = {held.name: held.master for held in part.tensors}
    if not (spec.model.tied_embeddings and {"embedding.weight", "head.weight"} <= by_name.keys()):
        return
    embedding, head = by_name["embedding.weight"], by_name["head.weight"]
    with torch.no_grad():
        local(head).copy_(local(embedding))
        for moment in MOMENTS:
            local(optimizer.state[head][moment]).copy_(local(optimizer.state[embedding][moment]))


def _moment(optimizer: torch.optim.Optimizer, moment: str, held: Held) -> torch.Tensor:
    state = optimizer.state[held.master]
    if moment not in state:
        state[moment] = torch.zeros_like(held.master, memory_format=torch.preserve_format)
    return local(state[moment])


def _boxes(
    spec: JobSpec, place: Coordinates, part: Part, prefix: str, tensor_of: Callable[[Held], torch.Tensor]
) -> State:
    found: State = {}
    for held in part.tensors:
        name = "embedding.weight" if held.name == "head.weight" and spec.model.tied_embeddings else held.name
        box = get_local_box(spec, place, held.spec)
        tensor = tensor_of(held)
        if box.numel:
            found.setdefault(f"{prefix}.{name}", Boxed(tensor[box.local_slices], box, held.spec.shape))
    return found


@dataclass(frozen=True)
class Boxed:
    """This rank's part of a tensor of shape `whole`: `tensor` has the sizes of `box`."""

    tensor: torch.Tensor
    box: TensorBox
    whole: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


State = dict[str, Boxed]


class BoxSavePlanner(DefaultSavePlanner):
    """Writes boxes; what several ranks hold alike is written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, boxed) for name, boxed in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor


class BoxLoadPlanner(DefaultLoadPlanner):
    """Reads what of each whole tensor falls into this rank's box, whatever boxes it was written in."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # Torch's own walks through the values to move DTensors, and finds none in a box.
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


def _write_item(name: str, boxed: Boxed) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, boxed.chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=boxed.chunk,
            properties=TensorProperties.create_from_tensor(boxed.tensor),
            size=torch.Size(boxed.whole),
        ),
    )
