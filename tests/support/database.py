"""The test's own database, as the processes that a test starts are told of it."""

from __future__ import annotations

from django.db import connection


def own_database() -> str:
    """As MESHBOARD_DATABASE_URL has it."""
    known = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{known['NAME']}"
    return f"postgres://{known['USER']}@{known['HOST']}:{known['PORT']}/{known['NAME']}"
