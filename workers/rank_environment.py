"""Environment variables by which a supervisor controls its ranks: the group timeout, and the handling of SIGTERM.

Slurm sends SIGTERM to all processes of a job, and leaves them time to save. The supervisor then asks its ranks to save.
So the guardian blocks SIGTERM, its child processes inherit the mask, and each process accepts SIGTERM only from its
parent. The supervisor ends the processes from parent to child: guardian, launcher, ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

GROUP_TIMEOUT_VARIABLE = "MESHBOARD_GROUP_TIMEOUT_S"
TERM_FROM_PARENT_VARIABLE = "MESHBOARD_TERM_FROM_PARENT"
DEFAULT_GROUP_TIMEOUT_S = 600


def get_group_timeout() -> timedelta:
    """Return the timeout of each process group.

    Pass it to every group, because a new group does not inherit it. Torch's own default is 30 minutes on gloo.
    """
    return timedelta(seconds=int(os.environ.get(GROUP_TIMEOUT_VARIABLE, DEFAULT_GROUP_TIMEOUT_S)))


def block_sigterm() -> None:
    """Block SIGTERM in this process and its child processes if the variable is set."""
    if TERM_FROM_PARENT_VARIABLE in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def accept_sigterm_from_parent() -> None:
    """Handle a blocked SIGTERM normally if the parent process sent it.

    A Python handler runs only when the main thread returns from native code.
    """
    if TERM_FROM_PARENT_VARIABLE in os.environ:
        threading.Thread(target=_raise_sigterm_from, args=(os.getppid(),), name="term", daemon=True).start()


def _raise_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
