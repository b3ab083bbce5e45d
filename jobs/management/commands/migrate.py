"""Django's own, of which each migration is whole or was not: what it did and that it was done are one transaction.

Django's executor (5.2) writes that down apart wherever an index or a foreign key is left for the end. A disk that is
full between the two, or a kill, left a table that is there and a migration that is not, which no later run could mend.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import OperationalError
from django.db.migrations.executor import MigrationExecutor
from django.db.transaction import TransactionManagementError


class Whole(MigrationExecutor):
    """Leaves nothing for the end, so that Django writes it down at once."""

    def apply_migration(self, state: Any, migration: Any, *args: Any, **options: Any) -> Any:
        migration.apply = partial(_applied, migration.apply)
        return super().apply_migration(state, migration, *args, **options)


def _applied(apply: Any, state: Any, editor: Any, *args: Any) -> Any:
    state = apply(state, editor, *args)
    while editor.deferred_sql:
        editor.execute(editor.deferred_sql.pop(0), None)
    return state


migrate.MigrationExecutor = Whole  # type: ignore[attr-defined]


class Command(migrate.Command):
    """The same, told in a sentence where the database cannot."""

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            super().handle(*args, **options)
        except OperationalError as error:
            raise CommandError(str(error).strip()) from error
        except (
            TransactionManagementError
        ) as error:  # SQLite's editor looks at rows once more: why it failed is the cause
            raise CommandError(str(error.__cause__ or error).strip()) from error
