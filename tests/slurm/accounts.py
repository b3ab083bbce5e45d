"""Run slurmdbd with a MariaDB on loopback for Slurm accounting."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

from tests.slurm.cluster import Cluster
from tests.support.processes import wait_until
from webapp.runner import find_free_port

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")
DBD = "accounting_storage/slurmdbd"
BIND = "--bind-address=127.0.0.1"
FORGETS_S = 2  # slurmctld forgets an ended job at its next check, within 10 s


def get_missing_requirement() -> str:
    """Return the reason why accounts are unavailable here, or an empty text."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"missing: {', '.join(absent)}; run tests/slurm/install_tools.sh" if absent else ""


@contextlib.contextmanager
def accounts(slurm: Cluster) -> Iterator[None]:
    """Run the cluster with accounts, and a slurmctld that soon forgets ended jobs."""
    port, before = find_free_port(), slurm.conf.read_text()
    settings = {
        "AccountingStorageType": DBD,
        "AccountingStorageHost": "localhost",
        "AccountingStoragePort": str(port),
        "AccountingStoragePass": f"{slurm.folder}/run/munge.socket",  # the limit from the manual of slurm.conf
    }
    try:
        _start_slurmdbd(slurm, _start_database(slurm), port)
        _add_cluster(slurm, settings)
        slurm.configure(slurm.with_settings(**settings, MinJobAge=str(FORGETS_S)))
        yield
    finally:
        slurm.configure(before)
        slurm.end("slurmdbd")
        slurm.end("mariadbd")


def _start_database(slurm: Cluster) -> int:
    """Start the database, and return its port."""
    folder, first, port = slurm.folder / "database", slurm.folder / "first.sql", find_free_port()
    made = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={folder}", "--skip-test-db"]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    user = "slurm@localhost"
    first.write_text(f"CREATE USER {user} IDENTIFIED BY 'tests';\nGRANT ALL ON accounts.* TO {user};\n")
    where = [f"--datadir={folder}", f"--socket={slurm.folder}/run/database", f"--port={port}"]
    slurm.run("mariadbd", ["mariadbd", "--no-defaults", "--user=root", *where, f"--init-file={first}", BIND])
    wait_until(lambda: _listens(port), "the database listens", 30)
    return port


def _start_slurmdbd(slurm: Cluster, database: int, port: int) -> None:
    conf = slurm.folder / "slurmdbd.conf"
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={slurm.folder}/run/munge.socket",
        f"DbdHost={os.uname().nodename}",
        f"DbdPort={port}",
        "SlurmUser=root",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={database}",
        "StorageUser=slurm",
        "StoragePass=tests",
        "StorageLoc=accounts",
        f"PidFile={slurm.folder}/run/slurmdbd.pid",
        f"LogFile={slurm.folder}/log/slurmdbd.log",
    ]
    conf.write_text("\n".join(lines) + "\n")
    conf.chmod(0o600)
    slurm.run("slurmdbd", ["slurmdbd", "-D"])
    wait_until(lambda: _listens(port), "slurmdbd listens", 60)


def _add_cluster(slurm: Cluster, settings: dict[str, str]) -> None:
    """Add the cluster before slurmctld registers.

    The command uses a separate configuration, because slurmctld does not have these accounts yet.
    """
    conf = slurm.folder / "accounts.conf"
    conf.write_text(slurm.with_settings(**settings))
    subprocess.run(
        ["sacctmgr", "--immediate", "add", "cluster", "tests"],
        env={**slurm.environment, "SLURM_CONF": str(conf)}, check=True, capture_output=True, timeout=30,
    )  # fmt: skip


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
