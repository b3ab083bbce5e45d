"""What a checkpoint's `.metadata` says of its files: which part of which tensor lies where.

It may be another host's word. Nothing of it is run, and it leads to no file but the checkpoint's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from planner.facts.models.shapes import stage_units
from planner.facts.spec import ModelSpec
from workers.checkpoint.files import read_at_most
from workers.checkpoint.manifests import Files, Manifest
from workers.checkpoint.state import MOMENTS
from workers.pickled import MOST_BYTES
from workers.torch_private.checkpoints import metadata_of
from workers.trainer.errors import UserError
from workers.trainer.model.initial import full_name

METADATA = ".metadata"


class Reader(FileSystemReader):
    """Torch's, which would unpickle `.metadata`, and `__0.metadata` where that fails."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(checkpoint: Path, manifest: Manifest) -> Metadata:
    """
    Raises:
        UserError: it cannot be read, holds what is not read, or does not fit the checkpoint's files and model.
    """
    try:
        metadata = metadata_of(read_at_most(checkpoint / METADATA, MOST_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {METADATA}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{METADATA} is refused: {error}") from None
    problem = _lost(metadata, manifest.files) or _scattered(metadata) or _missing(metadata, manifest.spec.model)
    if problem:
        raise UserError(f"{METADATA} is wrong: {problem}")
    return metadata


def _lost(metadata: Metadata, files: Files) -> str:
    """What lies elsewhere than in the checkpoint's files."""
    for index, info in metadata.storage_data.items():
        if info.relative_path not in files:
            return (
                f"{index.fqn[:100]!r} is stored in {info.relative_path[:100]!r}, which is not a file of the checkpoint"
            )
        end, (size, _) = info.offset + info.length, files[info.relative_path]
        if end > size:
            return f"{index.fqn[:100]!r} ends at byte {end:,} of {info.relative_path}, which has {size:,}"
    return ""


def _scattered(metadata: Metadata) -> str:
    """Parts that are none of their tensor, or lie nowhere."""
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # no other is made
        for chunk in tensor.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            ):
                return f"{name[:100]!r} of shape {list(tensor.size)} has a shard outside the tensor"
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                return f"{name[:100]!r} has a shard at offset {list(chunk.offsets)} that no file stores"
    return ""


def _missing(metadata: Metadata, model: ModelSpec) -> str:
    """What the model has, and Adam keeps of it, and is not there whole. Parts of one tensor are apart."""
    for unit in stage_units(model, range(model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            for kept in ("model", *MOMENTS):
                name = f"{kept}.{full_name(unit, parameter)}"
                tensor = metadata.state_dict_metadata.get(name)
                if not isinstance(tensor, TensorStorageMetadata):
                    return f"{name!r} is missing"
                if tuple(tensor.size) != parameter.shape:
                    return f"{name!r} has shape {list(tensor.size)}, but the model needs {list(parameter.shape)}"
                there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
                if there < parameter.numel:
                    return f"{name!r} has {there:,} of {parameter.numel:,} elements"
    return ""
