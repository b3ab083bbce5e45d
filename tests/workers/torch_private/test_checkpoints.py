"""Parse the `.metadata` file like torch, without execution of its code."""

from __future__ import annotations

import io
import pickle
import pickletools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from contracts.safe_unpickle import OPERATIONS, STOP, RefusedPickleError
from tests.jobs.traces.hostile import HOSTILE
from tests.support.processes import scale_timeout
from workers.torch_private.checkpoints import DTYPES, StorageInfo, parse_metadata

SHAPES = [(), (3,), (2, 300, 5)]
CHUNK = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 4)))
CIRCLE: list[Any] = []
MANY = [CHUNK] * 20_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save tensors of every shape and dtype."""
    path = tmp_path_factory.mktemp("written")
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    state = {f"{kind}/{shape}": torch.zeros(shape, dtype=kind) for kind in kinds for shape in SHAPES}
    dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def plain(metadata: Metadata) -> Metadata:
    """Remove the fields that the parser ignores."""
    return Metadata(metadata.state_dict_metadata, None, metadata.storage_data, StorageMeta())


def test_parses_metadata_like_torch(written: Path) -> None:
    expected = FileSystemReader(written).read_metadata()
    assert len(expected.state_dict_metadata) == 21
    assert parse_metadata((written / ".metadata").read_bytes()) == plain(expected)


def described(chunks: list[ChunkStorageMetadata], **changes: Any) -> Metadata:
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size((4, 4)), chunks)
    index = MetadataIndex("one", (0, 0), 0)
    return Metadata(
        **{"state_dict_metadata": {"one": tensor}, "storage_data": {index: StorageInfo("a", 0, 1)}} | changes
    )


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_parses_every_dtype_in_both_protocols(kind: torch.dtype, protocol: int) -> None:
    properties = TensorProperties(kind)
    tensor = TensorStorageMetadata(properties, torch.Size((2**40,)), [])
    whole = described([], state_dict_metadata={"one": tensor}, version="1.0.0")
    assert parse_metadata(pickle.dumps(whole, protocol)) == plain(whole)


def test_pickle_operations_match_the_standard_library() -> None:
    codes = {ord(one.code): one.name for one in pickletools.opcodes}
    assert codes[STOP] == "STOP"
    takes_a_name = {"GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
    assert {codes[code] for code in OPERATIONS} & takes_a_name == set()


def shared(depth: int) -> list[Any]:
    one: list[Any] = []
    for _ in range(depth):
        one = [one, one]
    return one


CIRCLE.append(CIRCLE)
BOMBS: dict[str, tuple[Any, str]] = {
    "many tensors of the same many parts": (
        described([], state_dict_metadata={str(i): described(MANY).state_dict_metadata["one"] for i in range(2_000)}),
        "more references to values than operations",
    ),
    "lists of lists": (described(shared(60)), "a list instead of a ChunkStorageMetadata"),
    "a list of itself": (described(CIRCLE), "a list instead of a ChunkStorageMetadata"),
    "a name that is a tuple": (described([], state_dict_metadata={(1,): None}), "a tensor's name is a tuple"),
    "bytes": (described([], state_dict_metadata={"one": BytesStorageMetadata()}), "BytesStorageMetadata"),
    "dims": (described([ChunkStorageMetadata(torch.Size([1] * 65), torch.Size(()))]), "65 dims, more than 64"),
    "below nothing": (described([ChunkStorageMetadata(torch.Size((-1,)), torch.Size(()))]), "torch.Size has -1"),
    "a large number": (described([], storage_data={MetadataIndex("a", (0,)): StorageInfo("a", 2**63, 1)}), "has 9223"),
    "a size that is true": (described([], storage_data={MetadataIndex("a", (0,)): StorageInfo("a", True, 1)}), "bool"),
    "transforms": (
        described([], storage_data={MetadataIndex("a", (0,)): StorageInfo("a", 0, 1, ["zstd"])}),
        "transforms",
    ),
    "no metadata": ({"a": 1}, "a PickledDict instead of a Metadata"),
    "a class of torch's": (torch.nn.Linear, "torch.nn.modules.linear.Linear is not allowed"),
    "a function of torch's": (torch.load, "torch.serialization.load is not allowed"),
    "a builtin": (getattr, "builtins.getattr is not allowed"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_rejects_values_that_torch_never_writes(name: str) -> None:
    value, message = BOMBS[name]
    began = time.monotonic()
    with pytest.raises(RefusedPickleError, match=message):
        parse_metadata(pickle.dumps(value))
    assert time.monotonic() - began < scale_timeout(2)


@pytest.mark.parametrize("name", HOSTILE)
def test_rejects_a_malicious_pickle(name: str) -> None:
    with pytest.raises(RefusedPickleError):
        parse_metadata(HOSTILE[name])


def test_state_of_a_dataclass_cannot_change_the_class() -> None:
    """Reject BUILD on a class, which would set its attributes."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, 4)
    pickler.proto = 4  # type: ignore[attr-defined]
    out.write(b"\x80\x04")
    pickler.save(Metadata)  # type: ignore[attr-defined]  # the class itself, not called
    pickler.save((None, {"version": "mine"}))  # type: ignore[attr-defined]
    out.write(pickle.BUILD + pickle.STOP)
    with pytest.raises(RefusedPickleError, match="unexpected GlobalName"):
        parse_metadata(out.getvalue())
    assert Metadata.version is None


def test_raises_only_its_own_error_for_any_changed_byte(written: Path) -> None:
    data = (written / ".metadata").read_bytes()[:1500]
    whole = pickle.dumps(described([CHUNK]))
    for good in (data, whole):
        for place in range(len(good)):
            for byte in (0, good[place] ^ 1, ord("R"), ord("b"), 0xFF):
                try:
                    parse_metadata(good[:place] + bytes([byte]) + good[place + 1 :])
                except RefusedPickleError:
                    continue
        for end in range(len(good)):
            with pytest.raises(RefusedPickleError):
                parse_metadata(good[:end])


def test_rejects_files_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(described([CHUNK]))
    monkeypatch.setattr("contracts.safe_unpickle.MAX_OPERATIONS", 100)
    with pytest.raises(RefusedPickleError, match="more than 100 operations"):
        parse_metadata(data)
    monkeypatch.setattr("contracts.safe_unpickle.MAX_BYTES", 100)
    with pytest.raises(RefusedPickleError, match="more than 100 bytes"):
        parse_metadata(data)
