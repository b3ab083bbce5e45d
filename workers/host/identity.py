"""Who a job's processes are, where they are not who the host worker is."""

from __future__ import annotations

import os

from workers.host.settings import CHOSEN_USER, JobUser


def as_user(user: JobUser | None, *, sandboxed: bool) -> list[str]:
    """The start of a command that runs the rest of it as `user`, for good; as ourselves it still loses what the
    sandbox's guardian may do. Empty when nothing changes."""
    without = ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"]
    if user is not None:
        groups = "--clear-groups" if user.name == CHOSEN_USER.name else "--init-groups"
        return ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), groups, *without]
    return ["setpriv", *without] if sandboxed and os.geteuid() == 0 else []
