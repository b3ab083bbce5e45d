"""Words for whoever looks on. Nobody fails over a terminal that was closed meanwhile."""

from __future__ import annotations

import os
import sys


def say(words: str) -> None:
    """Print a line now; what nobody can read any more is dropped, with all that follows."""
    try:
        print(words, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
