"""Types of single values in messages: bounded text, finite numbers, identifiers, and JSON objects."""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, AllowInfNan, Field, StringConstraints

MAX_INT64 = 2**63 - 1  # fits into msgpack, a database column and JavaScript's BigInt
MAX_ABS_NUMBER = 1e100  # far above float32, and sums of such numbers are still finite
MAX_JSON_DEPTH = 32
MAX_SHORT_TEXT_CHARS, MAX_TEXT_CHARS = 200, 1000
SHA256_PATTERN = r"^[0-9a-f]{64}$"
CHECKPOINT_NAME_PATTERN = r"^[a-z0-9-]{1,64}/[0-9]{1,10}/step-[0-9]{8,18}$"
TRACE_ID_PATTERN = r"^[0-9a-f]{32}$"  # of W3C Trace Context
HOST_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"  # part of addresses, queue names and Redis keys

# CSI sequences, then OSC and similar sequences up to their terminator, then two-byte escapes.
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b.?|\x9b[0-?]*[ -/]*[@-~]")
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# Overrides, embeddings and isolates. Direction marks and joiners remain, because languages and emoji need them.
DIRECTION_OVERRIDES = re.compile("[\u202a-\u202e\u2066-\u2069]")


def escape_direction_overrides(text: str) -> str:
    """Replace characters that reverse the direction of later text with their escapes."""
    return DIRECTION_OVERRIDES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def strip_control_characters(text: str) -> str:
    """Remove terminal escapes and control characters from a line. Tabs remain."""
    return CONTROLS.sub("", ESCAPES.sub("", text))


def _reject_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold NUL")
    return text


def _escape_and_truncate(max_chars: int) -> AfterValidator:
    """Build a validator for text that people read."""
    return AfterValidator(lambda text: escape_direction_overrides(text)[:max_chars])


def _validate_json(value: Any, depth: int = 0) -> Any:
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"is nested deeper than {MAX_JSON_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _reject_nul(value)
    if isinstance(value, int):
        if abs(value) > MAX_INT64:
            raise ValueError(f"is an integer of {value.bit_length()} bits, more than the limit of 63")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"must be finite, got {value}")
        return value
    if isinstance(value, list):
        return [_validate_json(item, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_reject_nul(key): _validate_json(item, depth + 1) for key, item in value.items()}
    raise ValueError(f"{type(value).__name__} is no JSON")


def _validate_address(text: str) -> str:
    ipaddress.ip_address(text)
    return text


Sha256 = Annotated[str, StringConstraints(pattern=SHA256_PATTERN)]  # as hexadecimal text
TraceId = Annotated[str, StringConstraints(pattern=TRACE_ID_PATTERN)]
JobId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
HostName = Annotated[str, StringConstraints(pattern=HOST_NAME_PATTERN)]
Address = Annotated[str, StringConstraints(max_length=45), AfterValidator(_validate_address)]  # IPv4 or IPv6
CheckpointName = Annotated[str, StringConstraints(pattern=CHECKPOINT_NAME_PATTERN)]
ShortText = Annotated[
    str,
    StringConstraints(max_length=MAX_SHORT_TEXT_CHARS),
    AfterValidator(_reject_nul),
    _escape_and_truncate(MAX_SHORT_TEXT_CHARS),
]
Text = Annotated[
    str, StringConstraints(max_length=MAX_TEXT_CHARS), AfterValidator(_reject_nul), _escape_and_truncate(MAX_TEXT_CHARS)
]
LogLine = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_reject_nul)]
Number = Annotated[float, AllowInfNan(False), Field(ge=-MAX_ABS_NUMBER, le=MAX_ABS_NUMBER)]
Seconds = Annotated[float, AllowInfNan(False), Field(ge=0, le=MAX_ABS_NUMBER)]
Count = Annotated[int, Field(ge=0, le=MAX_INT64)]
AttemptNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]
Rank = Annotated[int, Field(ge=0, le=65535)]
LogRank = Annotated[int, Field(ge=-1, le=65535)]  # -1: the launcher
Slot = Annotated[int, Field(ge=0, le=65535)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_validate_json)]
