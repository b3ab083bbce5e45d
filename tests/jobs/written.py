"""Which requests left an entry in the audit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.core.signals import request_finished, request_started
from django.db.models.signals import post_save
from django.urls import resolve

from jobs.models import AuditEntry


@contextlib.contextmanager
def written() -> Iterator[set[tuple[str, str]]]:
    """(method, route) of each, as they come; what a test writes itself between requests is nobody's."""
    found: set[tuple[str, str]] = set()
    asked: list[tuple[str, str]] = []

    def begun(environ: dict[str, Any], **_named: Any) -> None:
        asked[:] = [(environ["REQUEST_METHOD"].lower(), environ["PATH_INFO"])]

    def over(**_named: Any) -> None:
        asked.clear()

    def wrote(**_named: Any) -> None:
        found.update((method, resolve(path).route) for method, path in asked)

    request_started.connect(begun)
    request_finished.connect(over)
    post_save.connect(wrote, sender=AuditEntry)
    try:
        yield found
    finally:
        request_started.disconnect(begun)
        request_finished.disconnect(over)
        post_save.disconnect(wrote, sender=AuditEntry)
