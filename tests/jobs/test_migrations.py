"""Migrations are atomic on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, connections
from django.db.migrations.executor import MigrationExecutor

from tests.support.postgres import postgres_server, use_database


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database(request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path) -> Iterator[None]:
    if request.param == "sqlite":
        with use_database(f"sqlite:///{tmp_path}/old.sqlite3", migrated=False):
            yield
        return
    with postgres_server() as url, use_database(url, migrated=False):
        yield


REFUSES = {
    "sqlite": [
        "CREATE TRIGGER full BEFORE INSERT ON django_migrations BEGIN SELECT RAISE(ABORT, 'disk full'); END",
        "DROP TRIGGER full",
    ],
    "postgresql": [
        "ALTER TABLE django_migrations ADD CONSTRAINT disk_full CHECK (app <> 'jobs')",
        "ALTER TABLE django_migrations DROP CONSTRAINT disk_full",
    ],
}


@pytest.mark.usefixtures("empty_database")
def test_migration_that_cannot_be_recorded_is_rolled_back() -> None:
    executor = MigrationExecutor(connection)
    executor.migrate([node for node in executor.loader.graph.leaf_nodes() if node[0] in ("auth", "knox")])
    refuse, accept = REFUSES[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(refuse)
    with pytest.raises((CommandError, IntegrityError), match=r"disk.full"):
        call_command("migrate", "jobs", verbosity=0)
    connection.close()
    del connections["default"]  # A new process has a new connection.
    assert "jobs_loan" not in connection.introspection.table_names()
    with connection.cursor() as cursor:
        cursor.execute(accept)
    call_command("migrate", "jobs", verbosity=0)
    assert "jobs_loan" in connection.introspection.table_names()
