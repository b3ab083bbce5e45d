"""What a checkpoint's `.metadata` says of its files: which part of which tensor lies where.

It may be another host's word. Nothing of it is run, and it leads to no file but the checkpoint's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from workers.checkpoint.folder import regular
from workers.pickled import MOST_BYTES, RefusedPickleError
from workers.torch_private.checkpoints import metadata_of
from workers.trainer.errors import UserError

METADATA = ".metadata"
Files = dict[str, tuple[int, int]]  # bytes and CRC-32, as in a manifest


class Reader(FileSystemReader):
    """Torch's, which would unpickle `.metadata`, and `__0.metadata` where that fails."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(checkpoint: Path, files: Files) -> Metadata:
    """
    Raises:
        UserError: it holds what is not read, or does not fit the checkpoint's files.
        OSError: it cannot be opened.
    """
    with open(checkpoint / METADATA, "rb", opener=regular) as file:
        data = file.read(MOST_BYTES + 1)
    try:
        metadata = metadata_of(data)
    except RefusedPickleError as error:
        raise UserError(f"{METADATA} is not read: {error}") from None
    problem = _problem(metadata, files)
    if problem:
        raise UserError(f"{METADATA} is wrong: {problem}")
    return metadata


def _problem(metadata: Metadata, files: Files) -> str:
    for index, info in metadata.storage_data.items():
        if info.relative_path not in files:
            return f"{index.fqn[:100]!r} lies in {info.relative_path[:100]!r}, which is no file of the checkpoint"
        size, _ = files[info.relative_path]
        end = info.offset + info.length
        if end > size:
            return f"{index.fqn[:100]!r} ends at byte {end:,} of {info.relative_path}, which has {size:,}"
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # no other is made
        for chunk in tensor.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                end > size for end, size in zip(ends, tensor.size, strict=True)
            ):
                return f"{name[:100]!r} of shape {list(tensor.size)} has a part outside of it"
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                return f"{name[:100]!r} has a part at {list(chunk.offsets)} that lies nowhere"
    return ""
