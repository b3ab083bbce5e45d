"""The Slurm cluster that this board runs jobs on, if any.

Whether jobs can run on Slurm from here, for `manage.py doctor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from django.conf import settings


class Site(NamedTuple):
    """`folder` and `python` are those of all its nodes; `board` is where they reach us, and `ca_file` has certificates
    that they trust us by, "" for their own. `login` is a login node, "" for this machine; `ssh_config` the way there.
    """

    folder: str
    python: str
    board: str
    login: str = ""
    ssh_config: str = ""
    ca_file: str = ""

    def certificates(self) -> str:
        """PEM, "" for those that the nodes have. Raises OSError."""
        return Path(self.ca_file).read_text() if self.ca_file else ""


def configured() -> Site | None:
    """As MESHBOARD_SLURM_ variables name it."""
    return None if settings.SLURM is None else Site(**settings.SLURM)
