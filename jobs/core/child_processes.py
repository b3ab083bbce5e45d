"""Bind the life of a child process to its parent."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """End this process when its parent ends, which releases its port and its database."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
