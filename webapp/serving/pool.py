"""Connections to PostgreSQL that the web's requests share."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import connection
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from webapp.serving import limits

# PostgreSQL parses and plans a statement that comes again once on each connection: a fifth of a submit's time.
PLANNED_ONCE = {"server_side_binding": True, "prepare_threshold": 5}


def share_connections() -> None:
    """Before the first query. Under ASGI each request is in some thread, and would log in to the database anew."""
    database = settings.DATABASES["default"]
    if database["ENGINE"] != "django.db.backends.postgresql":
        return
    database["CONN_MAX_AGE"] = 0
    options = database.setdefault("OPTIONS", {})
    options.update(PLANNED_ONCE)
    options["pool"] = {
        "min_size": 2,
        "max_size": max(limits.FEWEST_CONNECTIONS, limits.DATABASE_CONNECTIONS // settings.WEB_PROCESSES),
        "timeout": limits.DATABASE_WAIT_S,
        # The pool waits twice as long from try to try. When it gives up, the next request has it try at once.
        "reconnect_timeout": limits.DATABASE_WAIT_S,
    }


def hand_back(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: who reads a long answer slowly keeps no connection from others meanwhile."""

    def answered(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if response.streaming and "pool" in connection.settings_dict["OPTIONS"]:
            connection.close()
        return response

    return answered
