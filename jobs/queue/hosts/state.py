"""How a host stands, in one word, the same on pages and over REST."""

from __future__ import annotations

from typing import Literal, get_args

from django.utils import timezone

from jobs.models import HOST_SILENT_AFTER, Host

HostState = Literal["connected", "drained", "silent", "lost"]
STATES: tuple[HostState, ...] = get_args(HostState)


def state_of(host: Host) -> HostState:
    """`lost`: it fell silent, and staff gave it up; it is back as soon as it is heard."""
    if host.last_seen < timezone.now() - HOST_SILENT_AFTER:
        return "lost" if host.given_up is not None and host.given_up > host.last_seen else "silent"
    return "drained" if host.drained else "connected"


def speaks(host: Host) -> bool:
    """Whether what it last said is of now."""
    return state_of(host) in ("connected", "drained")
