"""The bodies of messages that are msgpack: read as bytes within bounds, and described."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser

from contracts.codec import MAX_BATCH_BYTES, MAX_REPORT_BYTES
from jobs.api.http.parsers import TooLargeError


class MsgpackParser(BaseParser):
    """The bytes themselves, at most as many as a message has; `Content-Encoding: deflate` is undone within that."""

    media_type = "application/msgpack"
    encodings = ("deflate",)

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises TooLargeError, ParseError."""
        request = (parser_context or {})["request"]
        raw: bytes = stream.read(MAX_REPORT_BYTES + 1)
        if request.headers.get("Content-Encoding", "").strip().lower() == "deflate":
            raw = _inflated(raw)
        if len(raw) > MAX_REPORT_BYTES:
            raise TooLargeError(f"The message is larger than {MAX_REPORT_BYTES:,} bytes. Send smaller messages.")
        return raw


def _inflated(raw: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(raw, MAX_REPORT_BYTES + 1)
    except zlib.error as error:
        raise ParseError(f"The message cannot be decompressed with deflate: {error}") from None
    if reader.unconsumed_tail:
        raise TooLargeError(f"The message is larger than {MAX_REPORT_BYTES:,} bytes. Send smaller messages.")
    return found


BATCH_BODY = {"application/msgpack": {"type": "string", "format": "binary", "maxLength": MAX_BATCH_BYTES}}
REPORT_BODY = {"application/msgpack": {"type": "string", "format": "binary", "maxLength": MAX_REPORT_BYTES}}
