"""Checks of the database."""

from __future__ import annotations

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from tests.support.postgres import use_database
from webapp.checks import check_database_encoding


@pytest.mark.usefixtures("transactional_db")
def test_database_with_another_encoding_is_refused_before_migrations(postgres_url: str) -> None:
    server = postgres_url.rpartition("/")[0]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    with use_database(f"{server}/ascii", migrated=False):
        for command, options in (("migrate", {"skip_checks": False}), ("prepare", {})):
            with pytest.raises(SystemCheckError, match=r"meshboard\.E003.* ascii has the encoding SQL_ASCII"):
                call_command(command, **options)
    with psycopg.connect(f"{server}/ascii") as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    with use_database(postgres_url, migrated=False):
        assert check_database_encoding(None, databases=["default"]) == []
