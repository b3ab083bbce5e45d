"""What a socket's frame says."""

from __future__ import annotations

from typing import Any

import msgpack


def messages(frame: bytes | str) -> list[dict[str, Any]]:
    """Its messages: one stands alone, several are a list."""
    told = msgpack.unpackb(frame)
    return told if isinstance(told, list) else [told]
