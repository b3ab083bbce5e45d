"""Parsers of request bodies with size limits, and a fixed media type of responses."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO, Any

from django.conf import settings
from rest_framework import status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from contracts.codec import MAX_REPORT_BYTES
from jobs.core.received_files import MAX_PART_BYTES
from jobs.core.text import parse_json


class FixedMediaType(BaseContentNegotiation):
    """Content negotiation of views whose media type does not depend on the Accept header."""

    def select_parser(self, request: Request, parsers: list[BaseParser]) -> BaseParser | None:  # type: ignore[override]
        return parsers[0]

    def select_renderer(  # type: ignore[override]
        self, request: Request, renderers: list[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        return renderers[0], renderers[0].media_type


class TooLargeError(APIException):
    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = "The request body is larger than 1 MB. Send less."


class StrictJSONParser(BaseParser):
    """JSON parser that rejects large bodies, NaN, and deep nesting with a 4xx."""

    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        limit: int = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise TooLargeError
        try:
            return parse_json(raw)
        except ValueError as error:
            raise ParseError(f"The request body is not JSON: {error}") from None


class MsgpackParser(BaseParser):
    """Parser that returns the bytes of a msgpack message, and decompresses deflate up to the size limit."""

    media_type = "application/msgpack"
    encodings = ("deflate",)

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        request = (parser_context or {})["request"]
        raw: bytes = stream.read(MAX_REPORT_BYTES + 1)
        is_longer = False
        if request.headers.get("Content-Encoding", "").strip().lower() == "deflate":
            decompressor = zlib.decompressobj()
            try:
                raw = decompressor.decompress(raw, MAX_REPORT_BYTES + 1)
            except zlib.error as error:
                raise ParseError(f"The message cannot be decompressed with deflate: {error}") from None
            is_longer = bool(decompressor.unconsumed_tail)
        if is_longer or len(raw) > MAX_REPORT_BYTES:
            raise TooLargeError(f"The message is larger than {MAX_REPORT_BYTES:,} bytes. Send smaller messages.")
        return raw


class PartParser(BaseParser):
    """Parser that returns the bytes of a part of a file."""

    media_type = "application/octet-stream"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        raw: bytes = stream.read(MAX_PART_BYTES + 1)
        if len(raw) > MAX_PART_BYTES:
            raise TooLargeError(f"The uploaded part is larger than {MAX_PART_BYTES:,} bytes. Send smaller parts.")
        return raw
