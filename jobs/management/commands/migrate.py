"""The command `migrate` of Django, with each migration and its record in one transaction.

The executor of Django 5.2 records a migration separately if it defers an index or a foreign key. After a full disk or a
kill between both, the table would exist without its record, and later runs would fail.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import OperationalError
from django.db.migrations.executor import MigrationExecutor
from django.db.transaction import TransactionManagementError


class AtomicExecutor(MigrationExecutor):
    """Executor that runs deferred SQL in the transaction of the migration."""

    def apply_migration(self, state: Any, migration: Any, *args: Any, **options: Any) -> Any:
        migration.apply = partial(_apply_deferred, migration.apply)
        return super().apply_migration(state, migration, *args, **options)


def _apply_deferred(apply: Any, state: Any, editor: Any, *args: Any) -> Any:
    state = apply(state, editor, *args)
    while editor.deferred_sql:
        editor.execute(editor.deferred_sql.pop(0), None)
    return state


migrate.MigrationExecutor = AtomicExecutor  # type: ignore[attr-defined]


class Command(migrate.Command):
    """Command that prints database errors as sentences."""

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            super().handle(*args, **options)
        except OperationalError as error:
            raise CommandError(str(error).strip()) from error
        except TransactionManagementError as error:  # the cause is the error of SQLite
            raise CommandError(str(error.__cause__ or error).strip()) from error
