"""Recorder of the requests that write an audit entry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.core.signals import request_finished, request_started
from django.db.models.signals import post_save
from django.urls import resolve

from jobs.models import AuditEntry


@contextlib.contextmanager
def record_audited_routes() -> Iterator[set[tuple[str, str]]]:
    """Collect method and route of each request that writes an audit entry.

    Entries that a test writes between requests are ignored.
    """
    found: set[tuple[str, str]] = set()
    requests: list[tuple[str, str]] = []

    def start(environ: dict[str, Any], **_options: Any) -> None:
        requests[:] = [(environ["REQUEST_METHOD"].lower(), environ["PATH_INFO"])]

    def finish(**_options: Any) -> None:
        requests.clear()

    def add(**_options: Any) -> None:
        found.update((method, resolve(path).route) for method, path in requests)

    request_started.connect(start)
    request_finished.connect(finish)
    post_save.connect(add, sender=AuditEntry)
    try:
        yield found
    finally:
        request_started.disconnect(start)
        request_finished.disconnect(finish)
        post_save.disconnect(add, sender=AuditEntry)
