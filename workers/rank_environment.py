"""How long ranks wait for each other before they give up: said to every group, for torch's own default is half an hour
on gloo, and a group that is told nothing does not take that of the first one.

SIGTERM from the parent alone ends a process: Slurm sends its own to all that runs, and then leaves time to save.

The supervisor hears Slurm's and asks the ranks to save. What it ends itself it ends from parent to child, as ever:
guardian, launcher, ranks. The guardian blocks the signal, and all below it inherits that.
"""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

GROUP_TIMEOUT_VARIABLE = "MESHBOARD_GROUP_TIMEOUT_S"  # set by the supervisor from the host's settings
DEFAULT_GROUP_TIMEOUT_S = 600


def get_group_timeout() -> timedelta:
    """Of every process group of a job of ours."""
    return timedelta(seconds=int(os.environ.get(GROUP_TIMEOUT_VARIABLE, DEFAULT_GROUP_TIMEOUT_S)))


TERM_FROM_PARENT_VARIABLE = "MESHBOARD_TERM_FROM_PARENT"  # set by the supervisor


def block_sigterm() -> None:
    """For this process and all that it starts; nothing where the variable is not set."""
    if TERM_FROM_PARENT_VARIABLE in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def accept_sigterm_from_parent() -> None:
    """Of a process that began with the signal blocked: it is for its parent as if it were not.

    But that a handler of Python's waits for what its main thread is in.
    """
    if TERM_FROM_PARENT_VARIABLE in os.environ:
        threading.Thread(target=_heed, args=(os.getppid(),), name="term", daemon=True).start()


def _heed(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
