"""Changed event files of TensorBoard and run files of W&B. Each gives metrics that a batch can carry, or none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import pytest

from contracts.codec import decode_batch, encode_batch
from contracts.telemetry.batches import Batch
from tests.support.protobuf import encode_field, encode_varint
from tests.support.structures import change_bytes
from workers.host.supervisor.event_files import parse_event
from workers.host.supervisor.wandb_files import parse_record, read_history
from workers.metric_values import MetricCollector

VALUES: list[int | float | bytes] = [
    *(0, 5, 2**63, 2**64 - 1, 1.5, float("nan"), b"", b"loss", b"\xff\xff", b"NaN", b'"NaN"', b"1e999", b"[1]", b"{}"),
    *(b"1" * 5000, b"[" * 5000, b'{"a":' * 3000, b"null", b"true", b'{"a":{"a":{"a":{"a":1}}}}', b'"\\ud800"'),
    b'{"\\ud800":1}',
]


MAX_PART_BYTES = 2**16 - 1


def draw_message(draw: Random, depth: int = 0) -> bytes:
    fields = []
    for _ in range(draw.randrange(1, 5)):
        value = draw_message(draw, depth + 1) if depth < 4 and draw.random() < 0.4 else draw.choice(VALUES)
        fields.append(encode_field(draw.choice((1, 2, 3, 5, 6, 8, 16)), value))
    return b"".join(fields)


def check_metrics(collector: MetricCollector) -> int:
    """Return the number of metrics, which a batch can carry."""
    items = collector.take(final=True)
    decode_batch(encode_batch(Batch(v=1, job="j", attempt=1, time=1.0, items=[*items])))
    return sum(len(item["values"]) for item in items)


def read_event(draw: Random) -> int:
    valid = encode_field(1, b"loss") + encode_varint(2 << 3 | 5) + struct.pack("<f", 1.5)
    value = draw_message(draw) if draw.random() < 0.5 else valid
    event = encode_field(2, draw.choice((3, 0, 2**63, 2**64 - 1))) + encode_field(5, encode_field(1, value))
    collector = MetricCollector(0)
    for scalar in parse_event(change_bytes(draw, event) if draw.random() < 0.5 else event):
        collector.add("event file", scalar.step, {scalar.tag: scalar.value})
    return check_metrics(collector)


def build_history(item: bytes, step: int = 3) -> bytes:
    return encode_field(2, encode_field(1, item) + encode_field(2, encode_field(1, step)))


def read_run(draw: Random) -> int:
    valid = encode_field(1, b"loss") + encode_field(draw.choice((5, 6, 8, 16)), draw.choice(VALUES))
    record = build_history(draw_message(draw) if draw.random() < 0.4 else valid, draw.choice((3, 0, 2**64 - 1)))
    if draw.random() < 0.3:
        record = change_bytes(draw, record)
    record = record[:MAX_PART_BYTES]
    parts = [struct.pack("<IHB", 0, len(record), draw.choice((1, 1, 1, 2, 3, 4, 9))) + record for _ in range(3)]
    data = b":W&B\0\0\0" + b"".join(parts)
    history, used = read_history(change_bytes(draw, data) if draw.random() < 0.3 else data, 0)
    assert used >= 0
    collector = MetricCollector(0)
    for step, values in history:
        collector.add("wandb", step, values)
    return check_metrics(collector)


@pytest.mark.parametrize("read", [read_event, read_run])
def test_any_file_gives_metrics_or_none(read: Callable[[Random], int]) -> None:
    draw = Random(53)
    assert sum(read(draw) for _ in range(1500)) > 20


def test_deeply_nested_json_is_skipped() -> None:
    record = build_history(encode_field(1, b"loss") + encode_field(16, b"[" * 5000))
    assert parse_record(record) is None


def test_metric_name_with_a_surrogate_is_left_out() -> None:
    """Such a name made the whole batch of the rank fail."""
    collector = MetricCollector(0)
    collector.add("wandb", 1, {"\ud800": 1.0, "loss": 2.0})
    [item] = collector.take(final=True)
    assert (item["values"], item["left_out"]["names"]) == ({"loss": 2.0}, 1)
    assert check_metrics(collector) == 0
