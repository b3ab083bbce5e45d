"""A private PostgreSQL for tests and benchmarks: a throw-away cluster on a free port, always ended."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
from django.core.management import call_command
from django.db import connections

from tests.support.processes import wait_until
from webapp.runner import free_port
from webapp.settings import database

USER = "meshboard"
# It dies with its test: nothing needs to reach the disk.
SETTINGS = ["fsync=off", "synchronous_commit=off", "full_page_writes=off", "listen_addresses=127.0.0.1"]


def programs() -> Path | None:
    """The folder of PostgreSQL's server programs, None where there are none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in versions), key=lambda path: float(path.parent.name), default=None)


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Yields the URL of an empty database."""
    folder = programs()
    assert folder is not None, "PostgreSQL is not installed: apt-get install postgresql"
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="meshboard-postgres-") as home:
        if user != getpass.getuser():
            shutil.chown(home, user)
        data, port = Path(home, "data"), free_port()
        argv = [folder / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(argv, user=_other(user), cwd=home, check=True, capture_output=True)
        options = [part for setting in SETTINGS for part in ("-c", setting)]
        argv = [folder / "postgres", "-D", data, "-p", str(port), "-k", home, *options]
        with Path(home, "log").open("wb") as out:
            server = subprocess.Popen(argv, user=_other(user), cwd=home, stdout=out, stderr=out)
        try:
            url = f"postgres://{USER}@127.0.0.1:{port}/postgres"
            wait_until(lambda: _answers(url), "PostgreSQL answers", 30)
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # ends without waiting for its clients
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextlib.contextmanager
def default_database(url: str) -> Iterator[None]:
    """Django's default connection goes to this database, migrated, in every thread that starts within."""
    before = connections.settings["default"]
    replaced = {**before, "OPTIONS": {}, **database(url), "TEST": before["TEST"]}
    own = connections["default"]
    connections.settings["default"] = replaced
    del connections["default"]
    try:
        call_command("migrate", verbosity=0)
        yield
    finally:
        connections["default"].close()
        connections.settings["default"] = before
        connections["default"] = own


def _other(user: str) -> str | None:
    return user if os.geteuid() == 0 else None


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
