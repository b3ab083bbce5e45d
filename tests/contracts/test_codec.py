"""Codecs return valid messages unchanged, and refuse all others with BadMessageError."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.codec import (
    MAX_EVENT_BYTES,
    BadMessageError,
    decode_batch,
    decode_event,
    decode_frame,
    encode_batch,
    encode_event,
    salvage_frame,
    validate_exit_report,
    validate_launch_order,
)
from contracts.control import Event
from tests.support.structures import change_structure
from tests.support.telemetry import build_timeline as timeline

REVERSED, ESCAPED = "deli\u202eaf \u2066x", r"deli\u202eaf \u2066x"

CELL = {
    "phase": "step",
    "op": "all_reduce",
    "axis": "dp",
    "group_size": 2,
    "count": 3,
    "completed": 3,
    "payload_bytes": 2**40,
    "algorithmic_bytes": 2**40,
    "busy_s": 0.5,
}
ROW = {
    "phase": "step",
    "op": "send",
    "axis": "pp",
    "predicted_count": 1,
    "measured_count": 1,
    "predicted_bytes": 8,
    "measured_bytes": 8,
}
SUMMARY: dict[str, Any] = {
    "steps": 50,
    "tokens_per_s": 7000.0,
    "losses": [{"step": 1, "loss": 5.5, "time": 1.0}],
    "eval_losses": [],
    "cells": {"0": [CELL]},
    "verdict": {"0": [ROW]},
}
EXIT: dict[str, Any] = {
    "v": 1,
    "job": "abc",
    "attempt": 1,
    "outcome": "failed",
    "reason": "rank 1 was killed by SIGKILL after step 3",
    "exit_code": -9,
    "rank": 1,
    "signal": "SIGKILL",
    "log_tail": ["a line"],
    "started": 1.0,
    "finished": 2.5,
    "summary": SUMMARY,
}
REPORT: dict[str, Any] = {"job": "abc", "attempt": 1, "state": "exited", "slots": [0, 1], "exit": EXIT}
HOST: dict[str, Any] = {
    "kind": "host",
    "v": 1,
    "host": "gpu-7",
    "boot_id": "b",
    "incarnation": "i",
    "began": 1.0,
    "sequence": 7,
    "time": 2.0,
    "slots": 8,
    "device": "cpu",
    "device_name": "x86_64 CPU, 2 cores",
    "memory_bytes": 2**34,
    "attempts": [REPORT],
}
STEP: dict[str, Any] = {
    "kind": "step",
    "rank": 0,
    "time": 1.0,
    "step": 1,
    "ran": 1,
    "steps": 50,
    "step_s": 0.1,
    "tokens": 1024,
    "loss": 5.5,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "cells": [CELL],
}
FRAME: dict[str, Any] = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [STEP]}
ORDER: dict[str, Any] = {
    "v": 1,
    "job": "abc",
    "attempt": 1,
    "spec": {"layout": {"dp": 2}},
    "slots": [0],
    "expires": 9.0,
}


def changed(message: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a deep copy with one value replaced."""
    copy: Any = json.loads(json.dumps(message))
    *parents, last = path.split("/")
    inner = copy
    for part in parents:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(last) if isinstance(inner, list) else last] = value
    return dict(copy)


def test_valid_messages_survive_a_round_trip() -> None:
    event: Any = HOST
    assert decode_event(encode_event(event)) == HOST
    assert decode_frame(msgpack.packb(FRAME)) == FRAME
    batch: Any = {"v": 1, "job": "abc", "attempt": 1, "time": 1.0, "items": [STEP]}
    assert decode_batch(encode_batch(batch)) == batch
    assert validate_exit_report(EXIT) == EXIT
    assert validate_launch_order(ORDER) == ORDER


def test_ignores_unknown_field_of_newer_writer() -> None:
    assert decode_event(msgpack.packb({**HOST, "temperature": [40, 41]})) == HOST


WRONG = [
    ("slots", -1, "slots"),
    ("slots", True, "slots"),
    ("host", "h" * 300, "host"),
    ("host", "a\0b", "host"),
    ("host", "a\n", "host"),
    ("host", "../x", "host"),
    ("host", "<b>", "host"),
    ("v", 2, "v"),
    ("time", math.nan, "time"),
    ("sequence", 2**64 - 1, "sequence"),
    ("attempts", {"0": REPORT}, "attempts"),
    ("attempts/0/job", "../../etc", "job"),
    ("attempts/0/attempt", 0, "attempt"),
    ("attempts/0/slots", [-1], "slots"),
    ("attempts/0/exit/summary", "all went well", "summary"),
    ("attempts/0/exit/summary/losses/0/loss", math.nan, "loss"),
    ("attempts/0/exit/summary/tokens_per_s", math.inf, "tokens_per_s"),
    ("attempts/0/exit/summary/cells", {"zero": [CELL]}, "cells"),
    ("attempts/0/exit/summary/profile", {"gemm": [math.nan]}, "profile"),
    ("attempts/0/exit/summary/profile", {"device\0": 1}, "profile"),
    ("attempts/0/exit/summary/profile", {"m": 2**63}, "profile"),
    ("attempts/0/exit/reason", "r" * 1001, "reason"),
    ("attempts/0/exit/log_tail", ["NUL \0"], "log_tail"),
]


@pytest.mark.parametrize(
    ("path", "value", "field"), WRONG, ids=[f"{path}={str(value)[:20]!r}" for path, value, _ in WRONG]
)
def test_refuses_invalid_field_on_encode_and_decode(path: str, value: object, field: str) -> None:
    wrong: Any = changed(HOST, path, value)
    with pytest.raises(BadMessageError, match=field):
        decode_event(msgpack.packb(wrong))
    with pytest.raises(BadMessageError, match=field):
        encode_event(wrong)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", msgpack.packb([]), b"{}"])
def test_refuses_bytes_that_are_no_message(body: bytes) -> None:
    for decode in (decode_event, decode_frame, decode_batch):
        with pytest.raises(BadMessageError):
            decode(body)


def test_salvages_valid_items_of_a_frame() -> None:
    wrong = [{**STEP, "loss": math.nan}, {"kind": "nothing"}, [], None]
    frame, problems = salvage_frame(msgpack.packb({**FRAME, "items": [STEP, *wrong, STEP]}))
    assert frame == {**FRAME, "items": [STEP, STEP]}
    assert len(problems) == len(wrong)
    assert "loss" in problems[0]
    assert salvage_frame(msgpack.packb(FRAME)) == (FRAME, [])


@pytest.mark.parametrize("change", [{"items": "none"}, {"items": [{}], "v": 2}, {"items": [{}], "job": "../x"}])
def test_salvage_refuses_a_frame_with_invalid_fields(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessageError):
        salvage_frame(msgpack.packb({**FRAME, **change}))


def test_refuses_message_above_its_size_limit() -> None:
    with pytest.raises(BadMessageError, match="8,388,609 bytes, more than the limit of 8,388,608"):
        decode_event(b"\0" * (MAX_EVENT_BYTES + 1))


def test_refuses_deeply_nested_json() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"in": deep}
    with pytest.raises(BadMessageError, match="deeper"):
        validate_launch_order({**ORDER, "spec": deep})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def get_paths(message: object, prefix: str = "") -> list[str]:
    """Return the path of every value in a message."""
    found = [prefix] if prefix else []
    pairs: Any = (
        message.items() if isinstance(message, dict) else enumerate(message) if isinstance(message, list) else ()
    )
    for key, value in pairs:
        found += get_paths(value, f"{prefix}/{key}" if prefix else str(key))
    return found


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(get_paths(HOST)), ANYTHING)
def test_accepts_or_refuses_any_value_in_any_field(path: str, value: object) -> None:
    wrong = changed(HOST, path, value)
    try:
        body = msgpack.packb(wrong)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return
    try:
        decoded: Event = decode_event(body)
    except BadMessageError:
        return
    json.dumps(decoded, allow_nan=False)  # a database can store it
    assert "\\u0000" not in json.dumps(decoded)


METRIC: dict[str, Any] = {
    "kind": "metric",
    "rank": 0,
    "time": 1.0,
    "step": 1,
    "source": "wandb",
    "values": {"loss": 1.5},
    "not_finite": {"grad": "nan"},
    "left_out": {"names": 0, "rate": 1, "invalid": 0},
}
BATCH: dict[str, Any] = {"v": 1, "job": "abc", "attempt": 1, "time": 1.0, "items": [STEP, METRIC], "host": "gpu-7"}


@pytest.mark.parametrize("seed", [53, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(20))])
def test_batch_of_any_structure_is_accepted_or_refused(seed: int) -> None:
    draw, num_read = random.Random(seed), 0
    for _ in range(400):
        try:
            body = msgpack.packb(change_structure(draw, BATCH))
        except (ValueError, OverflowError, UnicodeEncodeError):  # msgpack cannot carry it
            continue
        with suppress(BadMessageError):
            json.dumps(decode_batch(body), allow_nan=False, ensure_ascii=False).encode()
            num_read += 1
    assert num_read


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | ANYTHING.map(lambda value: repr(value).encode()))
def test_refuses_random_bytes(body: bytes) -> None:
    for decode in (decode_event, decode_frame, decode_batch):
        with pytest.raises(BadMessageError):
            decode(body)


SENT: tuple[Any, ...] = (0, "all_reduce", 1, 0, 0, 10, 4000, -1)


@pytest.mark.parametrize(
    ("invalid_item", "problem"),
    [
        (timeline(0, calls=[(1, *SENT[1:])]), "unknown group"),
        (timeline(0, calls=[(*SENT[:5], 2**62, *SENT[6:])]), "outside its step"),
        (timeline(0, spans=[("forward", 0, 0, -(2**62), 0)]), "outside its step"),
        (timeline(0, began=1e50), "not a time"),
        (timeline(0, began=-1.0), "not a time"),
        ({**timeline(0, calls=[SENT]), "spans": {**timeline(0)["spans"], "chunk": [0]}}, "differ in length"),
    ],
)
def test_salvage_drops_inconsistent_timelines(invalid_item: Any, problem: str) -> None:
    """Prevent an HTTP 500 of the trace export and of the diagnosis."""
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [invalid_item, timeline(0, calls=[SENT])]}
    salvaged, problems = salvage_frame(msgpack.packb(frame))
    assert [item["kind"] for item in salvaged["items"]] == ["timeline"]
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.mark.parametrize("number", [1e101, -1e101, 1e308])
def test_refuses_numbers_whose_sum_can_overflow(number: float) -> None:
    """Prevent an HTTP 500 of the pages of the run, because the sum of such numbers is infinite."""
    item = {"kind": "eval", "rank": 0, "time": 1.0, "step": 1, "loss": number}
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [item, {**item, "loss": 3.4e38}]}
    salvaged, problems = salvage_frame(msgpack.packb(frame))
    assert [valid["loss"] for valid in salvaged["items"]] == [3.4e38]
    assert len(problems) == 1


def test_refuses_seconds_whose_sum_can_overflow() -> None:
    item = {"kind": "traffic", "rank": 0, "time": 1.0, "cells": [{**CELL, "busy_s": 1e308}], "dropped": 0}
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [item]}
    salvaged, problems = salvage_frame(msgpack.packb(frame))
    assert (salvaged["items"], len(problems)) == ([], 1)


def test_escapes_direction_overrides_in_texts_but_not_in_log_lines() -> None:
    report = validate_exit_report({**EXIT, "reason": REVERSED, "signal": REVERSED, "log_tail": [REVERSED]})
    assert (report["reason"], report["signal"], report["log_tail"]) == (ESCAPED, ESCAPED, [REVERSED])
    assert len(validate_exit_report({**EXIT, "reason": "\u202e" * 1000})["reason"]) == 1000
    for legitimate in (
        "\u0645\u0631\u062d\u0628\u0627\u200f!",
        "\U0001f469\u200d\U0001f4bb",
        "\u05e9\u05dc\u05d5\u05dd",
    ):
        assert validate_exit_report({**EXIT, "reason": legitimate})["reason"] == legitimate
