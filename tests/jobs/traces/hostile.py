"""Pickles that would run something, or hold more than there is."""

from __future__ import annotations

import pickle
import struct

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
}
