"""Run a private PostgreSQL, which shows races that SQLite with its single writer cannot show."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.core.management import call_command
from django.db import connection, connections
from pydantic import SecretStr

from tests.support.processes import run_process, wait_until
from webapp.runner import find_free_port
from webapp.setting_types import parse_database

DATABASE_NAME = "meshboard"


class Postgres:
    """A private server that can be stopped and restarted with the same port and data."""

    def __init__(self, argv: list[str], folder: Path, port: int) -> None:
        self._argv, self._folder, self._stack = argv, folder, contextlib.ExitStack()
        self._admin = f"host=127.0.0.1 port={port} user={DATABASE_NAME} dbname=postgres"
        self.url = f"postgres://{DATABASE_NAME}@127.0.0.1:{port}/{DATABASE_NAME}"

    def start(self) -> None:
        log = self._folder / "log"
        self._stack.enter_context(run_process(self._argv, {"PATH": os.environ["PATH"]}, log, self._folder))

        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self._admin, connect_timeout=1).close()
                return True
            return False

        wait_until(answers, f"PostgreSQL answers; its log:\n{log}", 30)

    def stop(self) -> None:
        self._stack.close()

    def create_database(self) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE_NAME}")


@contextlib.contextmanager
def run_postgres() -> Iterator[Postgres]:
    """Run a server with an empty database, and delete its data on exit."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    # The user postgres, which root must use to start the server, cannot enter pytest's own directory.
    with tempfile.TemporaryDirectory(prefix="meshboard-postgres-") as name:
        folder, port = Path(name), find_free_port()
        data = folder / "data"
        data.mkdir()
        as_user = []
        if os.geteuid() == 0:
            as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            for path in (folder, data):
                shutil.chown(path, "postgres")
        initdb = [str(programs / "initdb"), "-D", str(data), "-U", DATABASE_NAME]
        initdb += ["-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run([*as_user, *initdb], check=True, capture_output=True, cwd=folder)
        server = [str(programs / "postgres"), "-D", str(data), "-k", str(folder), "-p", str(port), "-F"]
        postgres = Postgres([*as_user, *server], folder, port)
        try:
            postgres.start()
            postgres.create_database()
            yield postgres
        finally:
            postgres.stop()


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server with an empty database, and return the URL of the database."""
    with run_postgres() as server:
        yield server.url


@contextlib.contextmanager
def use_database(url: str, *, migrated: bool = True) -> Iterator[None]:
    """Make an empty database the default of Django in all threads until exit."""
    before = settings.DATABASES["default"]
    _set_default_database({**before, "OPTIONS": {}, **parse_database(SecretStr(url)), "TEST": before["TEST"]})
    try:
        if migrated:
            call_command("migrate", verbosity=0)
            call_command("flush", interactive=False, verbosity=0)
        yield
    finally:
        _set_default_database(before)


def _set_default_database(database: dict[str, Any]) -> None:
    connections["default"].close()
    settings.DATABASES["default"] = database
    connections.settings["default"] = database
    del connections["default"]


def terminate_sessions(database: psycopg.Connection) -> None:
    """End all other sessions of the connection's database, as a restart of the server does."""
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def get_database_url() -> str:
    """Return the URL of the test's database as a value for MESHBOARD_DATABASE_URL."""
    config = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{config['NAME']}"
    return f"postgres://{config['USER']}@{config['HOST']}:{config['PORT']}/{config['NAME']}"
