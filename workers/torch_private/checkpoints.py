"""What `torch.distributed.checkpoint` writes into `.metadata`: a pickle, which its own reader runs.

`contracts.safe_unpickle` reads the pickle, and this module builds torch's own `Metadata` from its values.
`_StorageInfo`, `_MEM_FORMAT_ENCODING` and `torch.serialization._get_layout` are private; so is how each is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from contracts.safe_unpickle import GlobalName, PickledDict, PickledObject, RefusedPickleError, read_pickle

StorageInfo = _StorageInfo

T = TypeVar("T")
MOST_DIMS = 64  # torch's own bound
MOST_FIELDS = 8  # of a dataclass: torch's have five at most
FILES, METADATA = "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata"
SIZE = GlobalName("torch", "Size")
LAYOUT = GlobalName("torch.serialization", "_get_layout")
MEMORY_FORMAT = GlobalName(METADATA, "_MEM_FORMAT_ENCODING")
DTYPES = {
    GlobalName("torch", str(found).removeprefix("torch.")): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}
CLASSES = (*(Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata), MetadataIndex, StorageMeta)
PATHS = {
    GlobalName(module, "PosixPath") for module in ("pathlib", "pathlib._local")
}  # where it was written; not looked at
ADMITTED = frozenset(
    {SIZE, LAYOUT, MEMORY_FORMAT, GlobalName(FILES, "_StorageInfo"), *DTYPES, *PATHS}
    | {GlobalName(METADATA, one.__name__) for one in CLASSES}
)


def metadata_of(data: bytes) -> Metadata:
    """What a `.metadata` file holds.

    Raises:
        RefusedPickleError: it is broken, or holds what torch writes for no tensors.
    """
    found = read_pickle(data, ADMITTED)
    return _Maker(found.num_operations).metadata(found.value)


class _Maker:
    """Of torch's objects. It makes no more numbers than there are operations: what many point at is made again for
    each, and could be without end."""

    def __init__(self, most: int) -> None:
        self._left = most

    def metadata(self, value: Any) -> Metadata:
        fields = _fields(value, METADATA, "Metadata")
        tensors, stored = (_of(PickledDict, fields.get(key), key) for key in ("state_dict_metadata", "storage_data"))
        return Metadata(
            {_of(str, name, "a tensor's name"): self._tensor(tensor) for name, tensor in tensors},
            storage_data={self._index(index): self._storage(info) for index, info in stored},
            storage_meta=StorageMeta(),
        )

    def _tensor(self, value: Any) -> TensorStorageMetadata:
        fields = _fields(value, METADATA, "TensorStorageMetadata")
        chunks = [self._chunk(one) for one in self._each(_of(list, fields.get("chunks"), "chunks"))]
        return TensorStorageMetadata(_properties(fields.get("properties")), self._size(fields.get("size")), chunks)

    def _chunk(self, value: Any) -> ChunkStorageMetadata:
        fields = _fields(value, METADATA, "ChunkStorageMetadata")
        return ChunkStorageMetadata(self._size(fields.get("offsets")), self._size(fields.get("sizes")))

    def _index(self, value: Any) -> MetadataIndex:
        fields = _fields(value, METADATA, "MetadataIndex")
        index = fields.get("index")
        return MetadataIndex(
            _of(str, fields.get("fqn"), "fqn"),
            self._size(fields.get("offset")),
            None if index is None else _count(index, "index"),
        )

    def _storage(self, value: Any) -> _StorageInfo:
        fields = _fields(value, FILES, "_StorageInfo")
        if fields.get("transform_descriptors"):
            raise RefusedPickleError("storage transforms are not allowed")
        path, (offset, length) = fields.get("relative_path"), (fields.get(key) for key in ("offset", "length"))
        return _StorageInfo(_of(str, path, "relative_path"), _count(offset, "offset"), _count(length, "length"))

    def _size(self, value: Any) -> torch.Size:
        (sizes,) = _arguments(value, SIZE, 1)
        if len(_of(tuple, sizes, "a torch.Size")) > MOST_DIMS:
            raise RefusedPickleError(f"a torch.Size has {len(sizes)} dims, more than {MOST_DIMS}")
        return torch.Size(_count(one, "a torch.Size") for one in self._each(sizes))

    def _each(self, values: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
        self._left -= len(values)
        if self._left < 0:
            raise RefusedPickleError("more references to values than operations")
        return iter(values)


def _properties(value: Any) -> TensorProperties:
    """Of all that torch keeps here only the type is used."""
    _must_be(value, GlobalName(METADATA, "TensorProperties"))
    state = value.state
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not GlobalName or state[0] not in DTYPES:
        raise RefusedPickleError("damaged: TensorProperties without dtype")
    return TensorProperties(dtype=DTYPES[state[0]])


def _fields(value: Any, module: str, name: str) -> dict[str, Any]:
    """Of a dataclass."""
    _must_be(value, GlobalName(module, name))
    if len(_of(PickledDict, value.state, f"a {name}'s state")) > MOST_FIELDS:
        raise RefusedPickleError(f"damaged: a {name} has {len(value.state):,} fields")
    return {_of(str, key, f"a field of {name}"): found for key, found in value.state}


def _arguments(value: Any, name: GlobalName, count: int) -> tuple[Any, ...]:
    """Of a call."""
    _must_be(value, name)
    arguments: tuple[Any, ...] = value.arguments
    if len(arguments) != count:
        raise RefusedPickleError(f"damaged: {name.name} has {len(arguments)} arguments")
    return arguments


def _must_be(value: Any, name: GlobalName) -> None:
    if type(value) is not PickledObject or value.target != name:
        raise RefusedPickleError(f"damaged: {_words(value)} instead of a {name.name}")


def _of(kind: Callable[..., T], value: Any, what: str) -> T:
    if type(value) is not kind:
        raise RefusedPickleError(f"damaged: {what} is {_words(value)}")
    return value  # type: ignore[no-any-return]  # it is of that kind


def _count(value: Any, what: str) -> int:
    if not 0 <= _of(int, value, what) < 2**63:
        raise RefusedPickleError(f"damaged: {what} has {str(value)[:40]}")
    return int(value)


def _words(value: Any) -> str:
    return f"a {value.target.name if type(value) is PickledObject else type(value).__name__}"
