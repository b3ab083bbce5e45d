"""A checkpoint of this host, sent to an attempt that runs on others.

What sends is what a rank of the job would be: a process of its user, in its sandbox, that reads the job's checkpoints
and nothing else of ours. Our part is the door, on our reported address at a port that the kernel chose, and to say
where it is. It is open for one borrower and for WAIT_S, and closes when the attempt is cancelled or we end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import redis
from redis.exceptions import RedisError

from contracts.control import LendOrder
from contracts.names import cancel_key, loan_key
from workers.host.address import listening
from workers.host.apart.identity import as_user, user_of
from workers.host.apart.lending import give
from workers.host.apart.sandbox import PACKAGES, sandbox_prefix
from workers.host.guardian import namespace_prefix
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

PROGRAM = "workers.checkpoint.lend"
WAIT_S = 900.0  # for the borrower, which waits for all its hosts and reads its corpus first
AT_ONCE = 16
TURN_S = 60.0  # so long an order waits for its turn, of which the borrower knows nothing
LOOK_S = 1.0


class Lender:
    """A thread and a process for each loan. More than AT_ONCE wait, as after a drain, and are refused after TURN_S."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._free = threading.BoundedSemaphore(AT_ONCE)

    def lend(self, order: LendOrder) -> None:
        """Begin to, and return."""
        threading.Thread(target=self._lend, args=(order,), name=f"lend-{order['job']}", daemon=True).start()

    def _lend(self, order: LendOrder) -> None:
        name = f"{order['job']}/{order['attempt']}"
        if not self._free.acquire(timeout=TURN_S):
            log.warning(
                "cannot send a checkpoint to %s: still sending to %d other hosts after %.0f s", name, AT_ONCE, TURN_S
            )
            return
        try:
            log.info("sending a checkpoint to %s ended with %s", name, _lent(order, self._settings))
        except (RedisError, OSError) as error:
            log.warning("cannot send a checkpoint to %s: %s", name, error)
        finally:
            self._free.release()


def _lent(order: LendOrder, settings: HostSettings) -> int | None:
    """The exit code of what sent; None where somebody else lends. Raises RedisError, OSError."""
    where = loan_key(settings.name, order["job"], order["attempt"])
    with (
        redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2) as client,
        listening(settings.address) as door,
        tempfile.TemporaryDirectory(prefix=".lend-", dir=settings.run_dir) as folder,
    ):
        if client.exists(where):  # the order came twice
            return None
        with _sender(order, settings, door, Path(folder)) as sender:
            try:
                told = client.pipeline()
                told.hset(where, mapping={"address": settings.address, "port": door.getsockname()[1]})
                told.pexpire(where, int(WAIT_S * 1000))
                told.execute()
                _wait(sender, client, cancel_key(order["job"], order["attempt"]))
            finally:
                sender.kill()
        return sender.returncode


def _sender(order: LendOrder, settings: HostSettings, door: socket.socket, folder: Path) -> subprocess.Popen[bytes]:
    user, job = user_of(order, settings), settings.checkpoint_root / order["job"]
    folder.chmod(0o700)
    give(folder, user)
    bwrap = settings.sandbox == "bwrap"
    prefix = sandbox_prefix(settings, [job], [folder], folder, folder) if bwrap else namespace_prefix()
    command = [*prefix, *as_user(user, sandboxed=bwrap), sys.executable, "-m", PROGRAM, str(door.fileno())]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGES), "HOME": str(folder)}
    sender = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE, pass_fds=(door.fileno(),))
    # It stays open: its end tells that we have ended.
    assert sender.stdin is not None
    sender.stdin.write(json.dumps({"folder": str(job), "secret": order["secret"], "wait_s": WAIT_S}).encode() + b"\n")
    sender.stdin.flush()
    return sender


def _wait(sender: subprocess.Popen[bytes], client: redis.Redis, cancelled: str) -> None:
    """Until it has ended, or nobody wants what it sends."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sender.wait(LOOK_S)
            return
        with contextlib.suppress(RedisError):  # the sender has its own patience
            if client.exists(cancelled):
                return
