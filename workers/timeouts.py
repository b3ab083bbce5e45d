"""How long ranks wait for each other before they give up: said to every group, for torch's own default is half an hour
on gloo, and a group that is told nothing does not take that of the first one."""

from __future__ import annotations

import os
from datetime import timedelta

VARIABLE = "MESHBOARD_GROUP_TIMEOUT_S"  # set by the supervisor from the host's settings
DEFAULT_S = 600


def group_timeout() -> timedelta:
    """Of every process group of a job of ours."""
    return timedelta(seconds=int(os.environ.get(VARIABLE, DEFAULT_S)))
