"""A private PostgreSQL: for what SQLite forgives, and for races."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import base_environment, running, wait_until
from webapp.runner import free_port

USER = "postgres"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Its database URL. The data are thrown away; nothing is synced to disk."""
    programs = max(Path("/usr/lib/postgresql").iterdir()) / "bin"
    folder, port = Path(tempfile.mkdtemp(prefix="meshboard-postgres-")), free_port()
    as_owner: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, USER)
        as_owner = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    data = str(folder / "data")
    initdb = [*as_owner, str(programs / "initdb"), "-D", data, "-U", "meshboard", "-A", "trust", "--no-sync"]
    server = [*as_owner, str(programs / "postgres"), "-D", data, "-k", str(folder), "-p", str(port)]
    server += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    ready = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
    try:
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder)
        with running(server, base_environment(), folder.with_suffix(".log"), folder):
            wait_until(lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0, "it is ready")
            yield f"postgres://meshboard@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
