"""What a single value that crosses a process boundary may be: bounded text without NUL, finite numbers, plain JSON."""

from __future__ import annotations

import ipaddress
import math
from typing import Annotated, Any

from pydantic import AfterValidator, AllowInfNan, Field, StringConstraints

from contracts.plain import upright

LARGEST = 2**63 - 1  # what msgpack, a database and JavaScript's BigInt all hold
LARGEST_NUMBER = 1e100  # far beyond what 32 bits hold, and a sum of any many is still one that JSON has
DEEPEST = 32
LONGEST_WORD, LONGEST_SENTENCE = 200, 1000
CHECKPOINT_NAME = r"^[a-z0-9-]{1,64}/[0-9]{1,10}/step-[0-9]{8,18}$"
HOST_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"  # stands in addresses, queue names and keys


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold NUL")
    return text


def _upright(most: int) -> AfterValidator:
    """Of words that people read, in whatever shows them."""
    return AfterValidator(lambda text: upright(text)[:most])


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"is nested deeper than {DEEPEST}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _without_nul(value)
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise ValueError(f"is an integer of {value.bit_length()} bits, more than the limit of 63")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"must be finite, got {value}")
        return value
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_without_nul(key): _plain(item, depth + 1) for key, item in value.items()}
    raise ValueError(f"{type(value).__name__} is no JSON")


def _an_address(text: str) -> str:
    ipaddress.ip_address(text)
    return text


JobId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
HostName = Annotated[str, StringConstraints(pattern=HOST_NAME)]
Address = Annotated[str, StringConstraints(max_length=45), AfterValidator(_an_address)]  # IPv4 or IPv6
CheckpointName = Annotated[str, StringConstraints(pattern=CHECKPOINT_NAME)]
Word = Annotated[str, StringConstraints(max_length=LONGEST_WORD), AfterValidator(_without_nul), _upright(LONGEST_WORD)]
Sentence = Annotated[
    str, StringConstraints(max_length=LONGEST_SENTENCE), AfterValidator(_without_nul), _upright(LONGEST_SENTENCE)
]
LogLine = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_without_nul)]
Number = Annotated[float, AllowInfNan(False), Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Seconds = Annotated[float, AllowInfNan(False), Field(ge=0, le=LARGEST_NUMBER)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
AttemptNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]
Rank = Annotated[int, Field(ge=0, le=65535)]
LogRank = Annotated[int, Field(ge=-1, le=65535)]  # -1: the launcher
Slot = Annotated[int, Field(ge=0, le=65535)]
Plain = Annotated[dict[str, Any], AfterValidator(_plain)]
