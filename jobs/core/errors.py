"""Errors shared by REST and pages, and the id of the request that error pages and logs show."""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextvars import ContextVar

import redis
from django.db import DatabaseError, InterfaceError, OperationalError
from django.http import Http404

from contracts.traces import parse_traceparent

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGE = "The disk of the board is full."
READ_ONLY_SQLSTATE = "25006"  # of PostgreSQL, for a standby and for `default_transaction_read_only`
SQLITE_READ_ONLY = "attempt to write a readonly database"
REQUEST_ID_HEADER = b"x-request-id"
TRACEPARENT_HEADER = b"traceparent"
REQUEST_ID_FORMAT = re.compile(rb"[0-9a-f]{32}")  # format of nginx. Other values never get into a log.

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


class NotFoundError(Http404):
    """An object that does not exist, or that the user may not see.

    Args:
        what: Kind of the object, which is the name of the URL parameter in REST.
        text: Message. Default: "no such" and the kind.
    """

    def __init__(self, what: str, text: str = "") -> None:
        super().__init__(text or f"no such {what}")
        self.what = what


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused the error. Libraries repeat the text of the system error."""
    if isinstance(error, OSError):
        return error.errno in DISK_FULL_ERRNOS
    return any(os.strerror(number) in str(error) for number in DISK_FULL_ERRNOS)


def is_database_read_only(error: BaseException | None) -> bool:
    """Return whether the database answered, but refused a write."""
    cause = getattr(error, "__cause__", None)
    return getattr(cause, "sqlstate", None) == READ_ONLY_SQLSTATE or SQLITE_READ_ONLY in str(error)


def describe_outage(error: BaseException | None) -> str:
    """Return a sentence if the database or Redis does not answer or refuses writes, or an empty text."""
    if isinstance(error, DatabaseError) and is_database_read_only(error):
        return "The database is read-only, so Meshboard rejects changes."
    if isinstance(error, OperationalError | InterfaceError):
        return "The database does not answer."
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "Redis is read-only."
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "The memory of Redis is full."
    if isinstance(error, redis.RedisError):
        return "Redis does not answer."
    return ""


def set_request_id(header: bytes | None, traceparent: bytes | None = None) -> str:
    """Start a request with the id from the proxy, or with a new id. The trace ID is the client's, or the same id."""
    is_valid = header is not None and REQUEST_ID_FORMAT.fullmatch(header)
    request_id = header.decode() if header is not None and is_valid else secrets.token_hex(16)
    _request_id.set(request_id)
    trace_id = parse_traceparent(traceparent.decode("latin-1")) if traceparent is not None else None
    _trace_id.set(trace_id or request_id)
    return request_id


def get_request_id() -> str:
    """Return the id of the current request, empty outside of requests."""
    return _request_id.get()


def get_trace_id() -> str:
    """Return the trace ID of the current request, or a new trace ID outside of requests."""
    return _trace_id.get() or secrets.token_hex(16)
