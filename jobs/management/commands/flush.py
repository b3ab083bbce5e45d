"""Django's own `flush`, for which the audit lets go: a restore empties the board with it, and so do tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.commands import flush
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from jobs.models import AuditEntry

AUDIT = AuditEntry._meta.db_table


class Command(flush.Command):
    """Who can run it owns the database; nothing that the board serves does."""

    def handle(self, **options: Any) -> None:
        with _lifted(connections[options["database"]]):
            super().handle(**options)


@contextmanager
def _lifted(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Without the triggers of the audit's table, for nobody but this transaction."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if AUDIT not in connection.introspection.table_names(cursor):
            yield
        elif connection.vendor == "postgresql":
            cursor.execute(f"ALTER TABLE {AUDIT} DISABLE TRIGGER USER")
            yield
            cursor.execute(f"ALTER TABLE {AUDIT} ENABLE TRIGGER USER")
        else:
            cursor.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = %s", [AUDIT])
            triggers = cursor.fetchall()
            for name, _ in triggers:
                cursor.execute(f"DROP TRIGGER {name}")
            yield
            for _, statement in triggers:
                cursor.execute(statement)
