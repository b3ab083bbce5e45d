"""Ranks with the variables that torchrun gives them, forked from one process that has imported what they import.

    python -m tests.support.forked RANKS MODULE argument...

Each runs the module's `main`. Importing torch takes longer than most of what a test then does with it. Nothing has run
when they are forked, so there is no thread that a rank would miss.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from webapp.runner import free_port


def main() -> int:
    world, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    run = importlib.import_module(module).main
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = set()
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ |= {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [module, *arguments]
            _be(run)
        ranks.add(pid)
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            for other in ranks:  # they would wait for it
                os.kill(other, signal.SIGTERM)
    return int(failed)


def _be(run: Callable[[], int | None]) -> None:
    """A rank, which never comes back into what forked it."""
    code = 1
    try:
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
