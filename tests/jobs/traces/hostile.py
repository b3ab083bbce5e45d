"""Provide pickles that run commands or expand without bound."""

from __future__ import annotations

import pickle
import struct


def shared(depth: int) -> tuple[object, ...]:
    """Return nested tuples that refer to one text 2 ** depth times."""
    one: tuple[object, ...] = ("x",)
    for _ in range(depth):
        one = (one, one)
    return one


def circle() -> list[object]:
    one: list[object] = []
    one.append(one)
    return one


MEMO = b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b"."
HOSTILE: dict[str, bytes] = {
    "global": b"cos\nsystem\n(S'true'\ntR.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "inst": b"(S'true'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'true'\no.",
    "build": b"\x80\x02}}b.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"Pabc\n.",
    "buffer": b"\x80\x05\x97.",
    "memo that asks for 16 GB": MEMO,
    "set": pickle.dumps({1, 2}, 4),
    "no end": b"\x80\x02}",
    "cut": pickle.dumps({"entries": [1] * 100})[:-20],
    "a length beyond the end": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "empty stack": b"\x80\x02.",
    "unhashable": b"\x80\x02}]]s.",
    "nothing pops": b"\x80\x02a.",
    "a tuple of 2 ** 60": pickle.dumps(shared(60), 2),
    "a list of itself": pickle.dumps(circle(), 2),
    "a text a million times": pickle.dumps([["x" * 10**6] * 1000] * 1000, 2),
    "a number of 16,610 bits": pickle.dumps(10**5000, 2),
}


def shared_key(depth: int) -> bytes:
    """Return a dict whose only key takes 2 ** depth steps to hash."""
    return b"\x80\x02})" + b"q\x00h\x00\x86" * depth + b"Ns."


SHARED_KEY = shared_key(60)
