"""What crosses a process boundary: what fits comes back unchanged, anything else is refused in one way only."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.codec import (
    EVENT_BYTES,
    BadMessageError,
    checked_exit,
    checked_order,
    decode_batch,
    decode_event,
    decode_frame,
    encode_batch,
    encode_event,
    salvage_frame,
)
from contracts.control import Event
from tests.support.timelines import item as timeline

TURNED, UPRIGHT = "deli\u202eaf \u2066x", r"deli\u202eaf \u2066x"

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
    """A deep copy with one value replaced."""
    copy: Any = json.loads(json.dumps(message))
    *way, last = path.split("/")
    inner = copy
    for part in way:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(last) if isinstance(inner, list) else last] = value
    return dict(copy)


def test_what_fits_comes_back_as_it_was() -> None:
    event: Any = HOST
    assert decode_event(encode_event(event)) == HOST
    assert decode_frame(msgpack.packb(FRAME)) == FRAME
    batch: Any = {"v": 1, "job": "abc", "attempt": 1, "time": 1.0, "items": [STEP]}
    assert decode_batch(encode_batch(batch)) == batch
    assert checked_exit(EXIT) == EXIT
    assert checked_order(ORDER) == ORDER


def test_a_newer_writers_field_is_passed_over() -> None:
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
def test_what_does_not_fit_is_refused_by_name_on_both_ways(path: str, value: object, field: str) -> None:
    wrong: Any = changed(HOST, path, value)
    with pytest.raises(BadMessageError, match=field):
        decode_event(msgpack.packb(wrong))
    with pytest.raises(BadMessageError, match=field):
        encode_event(wrong)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", msgpack.packb([]), b"{}"])
def test_bytes_that_are_no_message_are_refused_alike(body: bytes) -> None:
    for decode in (decode_event, decode_frame, decode_batch):
        with pytest.raises(BadMessageError):
            decode(body)


def test_of_a_frame_with_wrong_items_the_others_stay() -> None:
    wrong = [{**STEP, "loss": math.nan}, {"kind": "nothing"}, [], None]
    frame, problems = salvage_frame(msgpack.packb({**FRAME, "items": [STEP, *wrong, STEP]}))
    assert frame == {**FRAME, "items": [STEP, STEP]}
    assert len(problems) == len(wrong)
    assert "loss" in problems[0]
    assert salvage_frame(msgpack.packb(FRAME)) == (FRAME, [])


@pytest.mark.parametrize("change", [{"items": "none"}, {"items": [{}], "v": 2}, {"items": [{}], "job": "../x"}])
def test_what_is_no_frame_is_not_salvaged(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessageError):
        salvage_frame(msgpack.packb({**FRAME, **change}))


def test_a_message_over_its_bound_is_not_even_read() -> None:
    with pytest.raises(BadMessageError, match="8,388,609 bytes, more than the limit of 8,388,608"):
        decode_event(b"\0" * (EVENT_BYTES + 1))


def test_what_is_nested_too_deep_is_refused() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"in": deep}
    with pytest.raises(BadMessageError, match="deeper"):
        checked_order({**ORDER, "spec": deep})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def places(message: object, so_far: str = "") -> list[str]:
    """The path of every value inside a message."""
    found = [so_far] if so_far else []
    pairs: Any = (
        message.items() if isinstance(message, dict) else enumerate(message) if isinstance(message, list) else ()
    )
    for key, value in pairs:
        found += places(value, f"{so_far}/{key}" if so_far else str(key))
    return found


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(places(HOST)), ANYTHING)
def test_any_value_in_any_place_is_taken_or_refused_never_worse(path: str, value: object) -> None:
    wrong = changed(HOST, path, value)
    try:
        body = msgpack.packb(wrong)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return
    try:
        taken: Event = decode_event(body)
    except BadMessageError:
        return
    json.dumps(taken, allow_nan=False)  # what was taken, a database takes
    assert "\\u0000" not in json.dumps(taken)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | ANYTHING.map(lambda value: repr(value).encode()))
def test_any_bytes_are_refused_never_worse(body: bytes) -> None:
    for decode in (decode_event, decode_frame, decode_batch):
        with pytest.raises(BadMessageError):
            decode(body)


SENT: tuple[Any, ...] = (0, "all_reduce", 1, 0, 0, 10, 4000, -1)


@pytest.mark.parametrize(
    ("nonsense", "words"),
    [
        (timeline(0, calls=[(1, *SENT[1:])]), "unknown group"),
        (timeline(0, calls=[(*SENT[:5], 2**62, *SENT[6:])]), "outside its step"),
        (timeline(0, spans=[("forward", 0, 0, -(2**62), 0)]), "outside its step"),
        (timeline(0, began=1e50), "not a time"),
        (timeline(0, began=-1.0), "not a time"),
        ({**timeline(0, calls=[SENT]), "spans": {**timeline(0)["spans"], "chunk": [0]}}, "differ in length"),
    ],
)
def test_a_step_that_cannot_be_told_is_left_out_by_itself(nonsense: Any, words: str) -> None:
    """As a file for Perfetto or Chrome it was a 500, and a run's diagnosis ended with it."""
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [nonsense, timeline(0, calls=[SENT])]}
    found, problems = salvage_frame(msgpack.packb(frame))
    assert [item["kind"] for item in found["items"]] == ["timeline"]
    assert len(problems) == 1
    assert words in problems[0]


@pytest.mark.parametrize("number", [1e101, -1e101, 1e308])
def test_a_number_whose_sums_are_none_is_refused(number: float) -> None:
    """Each is finite, and their sum was not: pages and REST of the run were a 500, its diagnosis none."""
    told = {"kind": "eval", "rank": 0, "time": 1.0, "step": 1, "loss": number}
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [told, {**told, "loss": 3.4e38}]}
    found, problems = salvage_frame(msgpack.packb(frame))
    assert [item["loss"] for item in found["items"]] == [3.4e38]
    assert len(problems) == 1


def test_seconds_whose_sums_are_none_are_refused() -> None:
    told = {"kind": "traffic", "rank": 0, "time": 1.0, "cells": [{**CELL, "busy_s": 1e308}], "dropped": 0}
    frame = {"v": 1, "job": "abc", "attempt": 1, "rank": 0, "items": [told]}
    found, problems = salvage_frame(msgpack.packb(frame))
    assert (found["items"], len(problems)) == ([], 1)


def test_words_for_people_turn_no_line_round_and_lines_of_logs_stay_what_they_are() -> None:
    told = checked_exit({**EXIT, "reason": TURNED, "signal": TURNED, "log_tail": [TURNED]})
    assert (told["reason"], told["signal"], told["log_tail"]) == (UPRIGHT, UPRIGHT, [TURNED])
    assert len(checked_exit({**EXIT, "reason": "\u202e" * 1000})["reason"]) == 1000, "as long as is kept of one"
    for legitimate in (
        "\u0645\u0631\u062d\u0628\u0627\u200f!",
        "\U0001f469\u200d\U0001f4bb",
        "\u05e9\u05dc\u05d5\u05dd",
    ):
        assert checked_exit({**EXIT, "reason": legitimate})["reason"] == legitimate
