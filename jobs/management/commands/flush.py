"""The command `flush` of Django, without the triggers of the audit log. Restores and tests use it."""

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
    """Web processes never run this command."""

    def handle(self, **options: Any) -> None:
        with _without_audit_triggers(connections[options["database"]]):
            super().handle(**options)


@contextmanager
def _without_audit_triggers(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Disable the triggers of the audit table within this transaction."""
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
