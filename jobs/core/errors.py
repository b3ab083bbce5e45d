"""Errors shared by REST and pages, and the id of the request that error pages and logs show."""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextvars import ContextVar

from django.http import Http404

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGE = "The disk of the board is full."
REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_FORMAT = re.compile(rb"[0-9a-f]{32}")  # format of nginx. Other values never get into a log.

_request_id: ContextVar[str] = ContextVar("request_id", default="")


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


def set_request_id(header: bytes | None) -> str:
    """Start a request with the id from the proxy, or with a new id."""
    is_valid = header is not None and REQUEST_ID_FORMAT.fullmatch(header)
    request_id = header.decode() if header is not None and is_valid else secrets.token_hex(16)
    _request_id.set(request_id)
    return request_id


def get_request_id() -> str:
    """Return the id of the current request, empty outside of requests."""
    return _request_id.get()
