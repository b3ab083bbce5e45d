"""Limits of a web process, and the pool of PostgreSQL connections that its requests share.

docs/reference/service-limits.md describes the behavior at each limit.
"""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.http import HttpRequest
from django.http.response import HttpResponseBase

MAX_CONNECTIONS = 2000  # open, with sockets. Further connections get 503
MAX_REQUEST_THREADS = 64  # per process. Further requests wait, except waiting requests and sockets
MAX_DATABASE_CONNECTIONS = 24  # to PostgreSQL, for all processes. PostgreSQL allows 100 by default
MIN_PROCESS_CONNECTIONS = 4  # per process
DATABASE_TIMEOUT_S = 5.0  # to get a connection
MAX_HEAD_BYTES = 64 * 2**10  # request line and headers
HEAD_TIMEOUT_S = 10.0  # from the first byte due to the last header
MAX_BODY_BYTES = 2**20
BODY_TIMEOUT_S = 30.0  # from the headers to the last byte of the body
MAX_LINGER_BYTES = 16 * 2**20  # discarded after a rejection, so that the client reads the response
LINGER_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 60.0  # for a client to read the next part of a response
KEEP_ALIVE_TIMEOUT_S = 75  # longer than in nginx (60 s), so that no request meets a closed connection
PROCESS_TIMEOUT_S = 30  # until another process replaces a silent process
MAX_SOCKET_FRAME_BYTES = 1024  # browsers send none
MAX_SOCKET_BYTES_PER_S = 4096  # of all frames, with pings. More closes the connection

# PostgreSQL parses and plans a repeated statement once per connection. This saves a fifth of the time of a submit.
PREPARED_STATEMENTS = {"server_side_binding": True, "prepare_threshold": 5}


def configure_connection_pool() -> None:
    """Share PostgreSQL connections between threads. Call this function before the first query.

    Under ASGI, each request runs in another thread, which would open its own connection.
    """
    database = settings.DATABASES["default"]
    if database["ENGINE"] != "django.db.backends.postgresql":
        return
    database["CONN_MAX_AGE"] = 0
    database["CONN_HEALTH_CHECKS"] = False  # the pool would pause for seconds after the second lost connection
    options = database.setdefault("OPTIONS", {})
    options.update(PREPARED_STATEMENTS)
    options["pool"] = {
        "min_size": 2,
        "max_size": max(MIN_PROCESS_CONNECTIONS, MAX_DATABASE_CONNECTIONS // settings.WEB_PROCESSES),
        "timeout": DATABASE_TIMEOUT_S,
        # The pool doubles its pause after each try. After it gives up, the next request tries at once.
        "reconnect_timeout": DATABASE_TIMEOUT_S,
    }
    connection_created.connect(replace_lost_connections)


def replace_lost_connections(connection: BaseDatabaseWrapper, **_: object) -> None:
    """Replace all lost connections of the pool if it gave a lost one, for example after a restart of PostgreSQL."""
    if connection.is_usable():
        return
    connection.pool.check()  # type: ignore[attr-defined]  # of PostgreSQL
    connection.close()
    connection.connect()


def release_connection(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Release the database connection before a streaming response, whose client may read slowly."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if response.streaming and "pool" in connection.settings_dict["OPTIONS"]:
            connection.close()
        return response

    return respond
