"""Parse the `.metadata` file of `torch.distributed.checkpoint`, a pickle that torch's reader would execute.

`contracts.safe_unpickle` reads the pickle, and this module builds torch's `Metadata` from its values. `_StorageInfo`,
`_MEM_FORMAT_ENCODING`, and `torch.serialization._get_layout` are private, and so is their pickle format.
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
MAX_DIMS = 64  # the limit of torch
MAX_FIELDS = 8  # fields of a dataclass, torch uses at most five
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
PATHS = {GlobalName(module, "PosixPath") for module in ("pathlib", "pathlib._local")}  # path of the writer, ignored
ALLOWED_NAMES = frozenset(
    {SIZE, LAYOUT, MEMORY_FORMAT, GlobalName(FILES, "_StorageInfo"), *DTYPES, *PATHS}
    | {GlobalName(METADATA, one.__name__) for one in CLASSES}
)


def parse_metadata(data: bytes) -> Metadata:
    """Return the content of a `.metadata` file. Raises RefusedPickleError."""
    found = read_pickle(data, ALLOWED_NAMES)
    return _MetadataBuilder(found.num_operations).metadata(found.value)


class _MetadataBuilder:
    """Build torch's objects, with at most as many numbers as there are pickle operations.

    Shared values are built again for each reference, which could grow without limit.
    """

    def __init__(self, max_values: int) -> None:
        self._left = max_values

    def metadata(self, value: Any) -> Metadata:
        fields = _get_fields(value, METADATA, "Metadata")
        tensors, stored = (
            _check_type(PickledDict, fields.get(key), key) for key in ("state_dict_metadata", "storage_data")
        )
        return Metadata(
            {_check_type(str, name, "a tensor's name"): self._tensor(tensor) for name, tensor in tensors},
            storage_data={self._index(index): self._storage(info) for index, info in stored},
            storage_meta=StorageMeta(),
        )

    def _tensor(self, value: Any) -> TensorStorageMetadata:
        fields = _get_fields(value, METADATA, "TensorStorageMetadata")
        chunks = [self._chunk(one) for one in self._each(_check_type(list, fields.get("chunks"), "chunks"))]
        return TensorStorageMetadata(_get_properties(fields.get("properties")), self._size(fields.get("size")), chunks)

    def _chunk(self, value: Any) -> ChunkStorageMetadata:
        fields = _get_fields(value, METADATA, "ChunkStorageMetadata")
        return ChunkStorageMetadata(self._size(fields.get("offsets")), self._size(fields.get("sizes")))

    def _index(self, value: Any) -> MetadataIndex:
        fields = _get_fields(value, METADATA, "MetadataIndex")
        index = fields.get("index")
        return MetadataIndex(
            _check_type(str, fields.get("fqn"), "fqn"),
            self._size(fields.get("offset")),
            None if index is None else _check_count(index, "index"),
        )

    def _storage(self, value: Any) -> _StorageInfo:
        fields = _get_fields(value, FILES, "_StorageInfo")
        if fields.get("transform_descriptors"):
            raise RefusedPickleError("storage transforms are not allowed")
        path, (offset, length) = fields.get("relative_path"), (fields.get(key) for key in ("offset", "length"))
        return _StorageInfo(
            _check_type(str, path, "relative_path"), _check_count(offset, "offset"), _check_count(length, "length")
        )

    def _size(self, value: Any) -> torch.Size:
        (sizes,) = _get_arguments(value, SIZE, 1)
        if len(_check_type(tuple, sizes, "a torch.Size")) > MAX_DIMS:
            raise RefusedPickleError(f"a torch.Size has {len(sizes)} dims, more than {MAX_DIMS}")
        return torch.Size(_check_count(one, "a torch.Size") for one in self._each(sizes))

    def _each(self, values: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
        self._left -= len(values)
        if self._left < 0:
            raise RefusedPickleError("more references to values than operations")
        return iter(values)


def _get_properties(value: Any) -> TensorProperties:
    """Return the tensor properties. Only the dtype is used."""
    _check_made(value, GlobalName(METADATA, "TensorProperties"))
    state = value.state
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not GlobalName or state[0] not in DTYPES:
        raise RefusedPickleError("damaged: TensorProperties without dtype")
    return TensorProperties(dtype=DTYPES[state[0]])


def _get_fields(value: Any, module: str, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    _check_made(value, GlobalName(module, name))
    if len(_check_type(PickledDict, value.state, f"a {name}'s state")) > MAX_FIELDS:
        raise RefusedPickleError(f"damaged: a {name} has {len(value.state):,} fields")
    return {_check_type(str, key, f"a field of {name}"): found for key, found in value.state}


def _get_arguments(value: Any, name: GlobalName, count: int) -> tuple[Any, ...]:
    """Return the arguments of a call."""
    _check_made(value, name)
    arguments: tuple[Any, ...] = value.arguments
    if len(arguments) != count:
        raise RefusedPickleError(f"damaged: {name.name} has {len(arguments)} arguments")
    return arguments


def _check_made(value: Any, name: GlobalName) -> None:
    if type(value) is not PickledObject or value.target != name:
        raise RefusedPickleError(f"damaged: {_describe(value)} instead of a {name.name}")


def _check_type(kind: Callable[..., T], value: Any, what: str) -> T:
    if type(value) is not kind:
        raise RefusedPickleError(f"damaged: {what} is {_describe(value)}")
    return value  # type: ignore[no-any-return]  # checked above


def _check_count(value: Any, what: str) -> int:
    if not 0 <= _check_type(int, value, what) < 2**63:
        raise RefusedPickleError(f"damaged: {what} has {str(value)[:40]}")
    return int(value)


def _describe(value: Any) -> str:
    return f"a {value.target.name if type(value) is PickledObject else type(value).__name__}"
