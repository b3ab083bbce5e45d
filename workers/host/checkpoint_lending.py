"""Send a checkpoint of this host to an attempt that runs on other hosts.

The sender is a process like a rank of the job: it has the job's user and sandbox, and reads only the job's checkpoints.
This module opens the listening socket on the host's address, and publishes its port. The socket accepts one connection
and stays open for MAX_WAIT_S. It closes when the attempt is cancelled or the host worker ends.
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
from workers.host.guardian import build_namespace_prefix
from workers.host.hardware import open_listener
from workers.host.isolation import (
    PACKAGE_ROOT,
    build_sandbox_prefix,
    build_user_prefix,
    get_job_user,
    make_owned_folder,
)
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

PROGRAM = "workers.checkpoint.lend"
MAX_WAIT_S = 900.0  # for the receiver, which first waits for all its hosts and reads its corpus
MAX_CONCURRENT_SENDS = 16
MAX_QUEUE_WAIT_S = 60.0
POLL_INTERVAL_S = 1.0


class CheckpointSenderPool:
    """One thread and process per transfer. More than MAX_CONCURRENT_SENDS wait, for example after a drain."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._free = threading.BoundedSemaphore(MAX_CONCURRENT_SENDS)

    def send(self, order: LendOrder) -> None:
        """Start a transfer in the background."""
        threading.Thread(target=self._send, args=(order,), name=f"lend-{order['job']}", daemon=True).start()

    def _send(self, order: LendOrder) -> None:
        name = f"{order['job']}/{order['attempt']}"
        if not self._free.acquire(timeout=MAX_QUEUE_WAIT_S):
            problem = "cannot send a checkpoint to %s: still sending to %d other hosts after %.0f s"
            log.warning(problem, name, MAX_CONCURRENT_SENDS, MAX_QUEUE_WAIT_S)
            return
        try:
            log.info("sending a checkpoint to %s ended with %s", name, _run_sender(order, self._settings))
        except (RedisError, OSError) as error:
            log.warning("cannot send a checkpoint to %s: %s", name, error)
        finally:
            self._free.release()


def _run_sender(order: LendOrder, settings: HostSettings) -> int | None:
    """Return the sender's exit code, or None if the order was delivered twice. Raises RedisError, OSError."""
    key = loan_key(settings.name, order["job"], order["attempt"])
    with (
        redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2) as client,
        open_listener(settings.address) as listener,
        tempfile.TemporaryDirectory(prefix=".lend-", dir=settings.run_dir) as folder,
    ):
        if client.exists(key):
            return None
        with _start_sender(order, settings, listener, Path(folder)) as sender:
            try:
                pipe = client.pipeline()
                pipe.hset(key, mapping={"address": settings.address, "port": listener.getsockname()[1]})
                pipe.pexpire(key, int(MAX_WAIT_S * 1000))
                pipe.execute()
                _wait(sender, client, cancel_key(order["job"], order["attempt"]))
            finally:
                sender.kill()
        return sender.returncode


def _start_sender(
    order: LendOrder, settings: HostSettings, listener: socket.socket, folder: Path
) -> subprocess.Popen[bytes]:
    user, checkpoints = get_job_user(order, settings), settings.checkpoint_root / order["job"]
    folder.chmod(0o700)
    make_owned_folder(folder, user)
    sandboxed = settings.sandbox == "bwrap"
    sandbox = build_sandbox_prefix(settings, [checkpoints], [folder], folder, folder) if sandboxed else None
    prefix = [*(sandbox or build_namespace_prefix()), *build_user_prefix(user, sandboxed=sandboxed)]
    descriptor = listener.fileno()
    sender = subprocess.Popen(
        [*prefix, sys.executable, "-m", PROGRAM, str(descriptor)],
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGE_ROOT), "HOME": str(folder)},
        stdin=subprocess.PIPE,
        pass_fds=(descriptor,),
    )
    # stdin stays open. Its end shows the sender that the host worker has ended.
    assert sender.stdin is not None
    request = {"folder": str(checkpoints), "secret": order["secret"], "wait_s": MAX_WAIT_S}
    sender.stdin.write(json.dumps(request).encode() + b"\n")
    sender.stdin.flush()
    return sender


def _wait(sender: subprocess.Popen[bytes], client: redis.Redis, cancel_flag: str) -> None:
    """Wait until the sender ends or the attempt is cancelled."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sender.wait(POLL_INTERVAL_S)
            return
        with contextlib.suppress(RedisError):  # the sender has its own timeouts
            if client.exists(cancel_flag):
                return
