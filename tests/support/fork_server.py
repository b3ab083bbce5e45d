"""Fork ranks with torchrun's variables from a process that has imported torch.

Importing torch takes seconds. Usage: python -m tests.support.fork_server FD

FD is a socket. A request on it has the file descriptors for the output of the ranks. The server answers with the PID
of their launcher, then with its exit code. The server has no threads, because a fork would lose them.
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

PRELOADED_MODULES = (
    "workers.trainer.__main__",
    "workers.checkpoint.__main__",
    "workers.lab.__main__",
    "torch._dynamo",
)
MAX_REQUEST_BYTES = 1 << 20


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED_MODULES:
        importlib.import_module(module)
    gc.freeze()  # otherwise each collection in a rank copies the pages of all imported objects
    while True:
        content, outputs, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not content:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run_and_exit(partial(_launch, json.loads(content), outputs))
        for output in outputs:
            os.close(output)
        connection.send(str(pid).encode())
        launcher = os.pidfd_open(pid)
        if launcher not in select.select([connection.fileno(), launcher], [], [])[0]:  # the client is gone
            os.killpg(pid, signal.SIGKILL)
            return
        os.close(launcher)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _launch(request: dict[str, Any], outputs: list[int]) -> int:
    """Fork the ranks, and return the exit code of the first that fails, which ends the others."""
    os.setsid()
    for output, stream in zip(outputs, (1, 2), strict=True):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    run = importlib.import_module(request["module"]).main
    num_ranks = request["ranks"]
    variables = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            _run_and_exit(run)
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


def _run_and_exit(run: Callable[[], int | None]) -> None:
    """Run a function in a forked process, and exit without a return to the code of the parent."""
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
