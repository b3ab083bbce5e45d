"""Who a job's processes are, where they are not who the host worker is."""

from __future__ import annotations

import os

from contracts.control import LaunchOrder, LendOrder
from workers.host.settings import CHOSEN_USER, MOST_OWNERS, OWNERS, HostSettings, JobUser


def user_of(order: LaunchOrder | LendOrder, settings: HostSettings) -> JobUser | None:
    """Who an order's processes are, of who they may be here: each owner's are another user's."""
    if settings.job_user != OWNERS:
        return settings.job_user
    own = OWNERS.uid + order.get("owner", 0) % MOST_OWNERS
    # A folder that is lent is its group's. In bubblewrap a job sees that of its own script alone as one to write to.
    return OWNERS._replace(uid=own, gid=OWNERS.gid if settings.sandbox == "bwrap" else own)


def as_user(user: JobUser | None, *, sandboxed: bool) -> list[str]:
    """The start of a command that runs the rest of it as `user`, for good; as ourselves it still loses what the
    sandbox's guardian may do. Empty when nothing changes."""
    without = ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"]
    if user is not None:
        groups = "--clear-groups" if user.name == CHOSEN_USER.name else "--init-groups"
        return ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), groups, *without]
    return ["setpriv", *without] if sandboxed and os.geteuid() == 0 else []
