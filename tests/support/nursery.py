"""Ranks with the variables that torchrun gives them, forked from one process that has imported what they import.

    python -m tests.support.nursery FD

Importing torch takes longer than most of what a test then does with it. FD is a socket over which each request comes
with where its ranks write, and goes back their launcher's process and how it ended. Nothing runs in this process, so
there is no thread that a rank would miss.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from webapp.runner import find_free_port

LOADED = ("workers.trainer.__main__", "workers.checkpoint.__main__", "workers.lab.__main__", "torch._dynamo")
LARGEST_REQUEST = 1 << 20


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()  # else each rank looks through, and copies, what was imported, again and again
    while True:
        content, outputs, _, _ = socket.recv_fds(line, LARGEST_REQUEST, 2)
        if not content:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _be(partial(_launch, json.loads(content), outputs))
        for output in outputs:
            os.close(output)
        line.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        if ended not in select.select([line.fileno(), ended], [], [])[0]:  # who asked is gone
            os.killpg(pid, signal.SIGKILL)
            return
        os.close(ended)
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _launch(asked: dict[str, Any], outputs: list[int]) -> int:
    """Fork the ranks and wait for them; the first that fails ends the others, which would wait for it, and its code is
    the launcher's."""
    os.setsid()
    for output, stream in zip(outputs, (1, 2), strict=True):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = [asked["module"], *asked["arguments"]]
    run = importlib.import_module(asked["module"]).main
    meeting = {"WORLD_SIZE": str(asked["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = set()
    for rank in range(asked["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.environ.update({**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            _be(run)
        ranks.add(pid)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = abs(os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return code


def _be(run: Callable[[], int | None]) -> None:
    """A process of its own, which never comes back into what forked it."""
    code = 1
    try:
        code = run() or 0
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
