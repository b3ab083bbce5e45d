"""History in run files of W&B. The files are written here as W&B 0.31 writes them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.protobuf import encode_field
from workers.host.supervisor.event_files import EventFiles
from workers.host.supervisor.wandb_files import (
    BLOCK_BYTES,
    MAX_RECORD_BYTES,
    PART_HEADER_BYTES,
    parse_record,
    read_history,
)

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)


def encode_item(name: str, value: Any) -> bytes:
    return encode_field(1, encode_field(2, name.encode()) + encode_field(16, json.dumps(value).encode()))


def encode_step(step: int, **values: Any) -> bytes:
    items = b"".join(encode_item(name, value) for name, value in values.items())
    return encode_field(1, step) + encode_field(2, items + encode_field(2, encode_field(1, step)))


def write_file(*records: bytes) -> bytes:
    """Return a file with these records, which are cut at the ends of blocks."""
    data = bytearray(HEADER)
    for record in records:
        is_first, rest = True, record
        while is_first or rest:
            left = BLOCK_BYTES - len(data) % BLOCK_BYTES
            if left < PART_HEADER_BYTES:
                data += bytes(left)
                left = BLOCK_BYTES
            part, rest = rest[: left - PART_HEADER_BYTES], rest[left - PART_HEADER_BYTES :]
            kind = (1 if not rest else 2) if is_first else (4 if not rest else 3)
            data += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    return bytes(data)


def test_reads_growing_file_with_records_across_blocks() -> None:
    records = [encode_step(step, loss=1 / (step + 1), note="x" * (step * 700)) for step in range(80)]
    data = write_file(*records)
    assert len(data) > 3 * BLOCK_BYTES
    for size in (999, 10**6):
        found, offset = [], 0
        for end in range(size, len(data) + size, size):
            steps, used = read_history(data[offset : min(end, len(data))], offset)
            found += [(step, values["loss"]) for step, values in steps]
            offset += used
        assert found == [(step, 1 / (step + 1)) for step in range(80)]


def test_kinds_of_values() -> None:
    typed = encode_field(1, encode_field(1, b"count") + encode_field(5, 2**64 - 3))
    typed += encode_field(1, encode_field(1, b"rate") + b"\x31" + struct.pack("<d", 0.25))
    record = encode_field(2, typed + encode_field(2, encode_field(1, 7)))
    assert parse_record(record) == (7, {"count": -3, "rate": 0.25})
    assert parse_record(encode_step(1, _timestamp=5, text="a", nested={"a": 1})) == (
        1,
        {"text": "a", "nested": {"a": 1}},
    )
    assert parse_record(encode_step(1, loss="Infinity")) == (1, {"loss": float("inf")})


@pytest.mark.parametrize("record", [b"", b"\xff" * 20, encode_field(3, b"x"), encode_field(2, b"\x0a\x05ab")])
def test_other_and_malformed_records_have_no_values(record: bytes) -> None:
    assert parse_record(record) is None


def test_damaged_block_costs_only_itself() -> None:
    data = bytearray(write_file(*(encode_step(step, loss=1.0, note="x" * 1000) for step in range(100))))
    data[100 : 100 + 5000] = b"\xff" * 5000
    steps, used = read_history(bytes(data), 0)
    assert used == len(data)
    assert [step for step, _ in steps] == list(range(32, 100))


def test_large_records_and_other_files_are_skipped() -> None:
    data = write_file(b"x" * (MAX_RECORD_BYTES + 10**5), encode_step(5, loss=1.0))
    assert read_history(data, 0)[0] == [(5, {"loss": 1.0})]
    assert read_history(b"another format" * 100, 0) == ([], 0)


def test_metrics_of_run_files_are_read_unless_the_meter_reads_the_calls(tmp_path: Path) -> None:
    run = tmp_path / "wandb/offline-run-1"
    run.mkdir(parents=True)
    (run / "run-1.wandb").write_bytes(write_file(encode_step(3, loss=2.5), encode_step(4, loss="NaN")))
    files = EventFiles([tmp_path], 0, frozenset({os.getuid()}))
    files._began_s = 0
    assert files.read({"wandb"}) == []
    items = files.read({"SummaryWriter"})
    assert [(item["source"], item["step"], item["values"]) for item in items] == [
        ("wandb", 3, {"loss": 2.5}),
        ("wandb", 4, {}),
    ]
    assert items[1]["not_finite"] == {"loss": "nan"}
