"""Boxes of whole tensors for torch.distributed.checkpoint: each rank says where its part lies, DCP does the rest."""

from __future__ import annotations

from dataclasses import dataclass
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

from planner.facts.tensors.boxes import Box


@dataclass(frozen=True)
class Boxed:
    """This rank's part of a tensor of shape `whole`: `tensor` has the sizes of `box`."""

    tensor: torch.Tensor
    box: Box
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
