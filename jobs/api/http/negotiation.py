"""What is written, where that does not hang on what is accepted."""

from __future__ import annotations

from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


class WhateverIsAccepted(BaseContentNegotiation):
    """A log is text, events are events, a file is of the format asked for, and a refusal JSON, whoever asks."""

    def select_parser(self, request: Request, parsers: list[BaseParser]) -> BaseParser | None:  # type: ignore[override]
        return parsers[0]

    def select_renderer(  # type: ignore[override]
        self, request: Request, renderers: list[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        return renderers[0], renderers[0].media_type
