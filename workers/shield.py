"""SIGTERM from the parent alone ends a process: Slurm sends its own to all that runs, and then leaves time to save.

The supervisor hears Slurm's and asks the ranks to save. What it ends itself it ends from parent to child, as ever:
guardian, launcher, ranks. The guardian blocks the signal, and all below it inherits that.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "MESHBOARD_TERM_FROM_PARENT"  # set by the supervisor


def block() -> None:
    """For this process and all that it starts; nothing where the variable is not set."""
    if VARIABLE in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def heed_parent() -> None:
    """Of a process that began with the signal blocked: it is for its parent as if it were not.

    But that a handler of Python's waits for what its main thread is in.
    """
    if VARIABLE in os.environ:
        threading.Thread(target=_heed, args=(os.getppid(),), name="term", daemon=True).start()


def _heed(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
