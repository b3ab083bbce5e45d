"""How an event shows whose it is, also where hosts share what they may do in Redis."""

from __future__ import annotations

import hashlib
import hmac


def signature(key: bytes, body: bytes) -> bytes:
    """HMAC-SHA256 of a message by its sender's key: 32 bytes."""
    return hmac.new(key, body, hashlib.sha256).digest()


def entry(key: bytes, body: bytes) -> dict[str | bytes, bytes]:
    """The fields of an entry of `names.events_stream`."""
    return {"b": body, "s": signature(key, body)}


SIGNATURE_BYTES = 32


def sealed(key: bytes, body: bytes) -> bytes:
    """A message that travels as one string of bytes."""
    return signature(key, body) + body
