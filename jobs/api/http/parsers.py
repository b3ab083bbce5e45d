"""JSON, strictly: no NaN, no endless nesting, at most 1 MB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from django.conf import settings
from rest_framework import status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import BaseParser

from jobs.core.text import parse_json


class TooLargeError(APIException):
    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = "The request body is larger than 1 MB. Send less."


class StrictJSONParser(BaseParser):
    """Like DRF's, but bounded, and every failure is a 4xx."""

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
