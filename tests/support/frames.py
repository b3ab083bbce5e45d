"""What a socket's frame says."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack


def messages(frame: bytes | str) -> list[dict[str, Any]]:
    """Its messages: one stands alone, several are a list, many bytes are deflated."""
    told = msgpack.unpackb(frame)
    if "deflated" in told:
        told = msgpack.unpackb(zlib.decompress(told["deflated"]))
    return told if isinstance(told, list) else [told]
