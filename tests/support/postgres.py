"""A private PostgreSQL for races that SQLite, which has one writer at a time, cannot show."""

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

from tests.support.processes import running, wait_until
from webapp.runner import find_free_port
from webapp.setting_types import parse_database

NAME = "meshboard"


class Postgres:
    """A private server that can be stopped and started again on the same port and data."""

    def __init__(self, argv: list[str], folder: Path, port: int) -> None:
        self._argv, self._folder, self._stack = argv, folder, contextlib.ExitStack()
        self._admin = f"host=127.0.0.1 port={port} user={NAME} dbname=postgres"
        self.url = f"postgres://{NAME}@127.0.0.1:{port}/{NAME}"

    def start(self) -> None:
        environment = {"PATH": os.environ["PATH"]}
        self._stack.enter_context(running(self._argv, environment, self._folder / "log", self._folder))
        wait_until(lambda: _answers(self._admin), f"PostgreSQL answers; its log:\n{self._folder / 'log'}", 30)

    def stop(self) -> None:
        self._stack.close()

    def make(self) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {NAME}")


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of an empty database on a cluster of its own, which forgets everything."""
    with postgres() as server:
        yield server.url


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """The same, as what can be stopped."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    # pytest's own directory is closed to the postgres user, as whom root must start it.
    with tempfile.TemporaryDirectory(prefix="meshboard-postgres-") as name:
        folder, port = Path(name), find_free_port()
        data = folder / "data"
        data.mkdir()
        as_user = []
        if os.geteuid() == 0:
            as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            for path in (folder, data):
                shutil.chown(path, "postgres")
        initdb = [str(programs / "initdb"), "-D", str(data), "-U", NAME, "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run([*as_user, *initdb], check=True, capture_output=True, cwd=folder)
        server = [str(programs / "postgres"), "-D", str(data), "-k", str(folder), "-p", str(port), "-F"]
        made = Postgres([*as_user, *server], folder, port)
        try:
            made.start()
            made.make()
            yield made
        finally:
            made.stop()


def _answers(address: str) -> bool:
    try:
        psycopg.connect(address, connect_timeout=1).close()
    except psycopg.OperationalError:
        return False
    return True


@contextlib.contextmanager
def as_default_database(url: str, *, migrated: bool = True) -> Iterator[None]:
    """Django's default database is this one, in every thread, until the end; then it is empty again."""
    before = settings.DATABASES["default"]
    told = parse_database(SecretStr(url))
    _switch({**before, "OPTIONS": {}, **told, "TEST": before["TEST"]})
    try:
        if migrated:
            call_command("migrate", verbosity=0)
            call_command("flush", interactive=False, verbosity=0)
        yield
    finally:
        _switch(before)


def _switch(told: dict[str, Any]) -> None:
    connections["default"].close()
    settings.DATABASES["default"] = told
    connections.settings["default"] = told
    del connections["default"]


def own_database() -> str:
    """The test's, as MESHBOARD_DATABASE_URL has it for the processes that it starts."""
    known = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{known['NAME']}"
    return f"postgres://{known['USER']}@{known['HOST']}:{known['PORT']}/{known['NAME']}"
