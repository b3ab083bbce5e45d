"""Hosts and join tokens as JSON."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from contracts.hosts import HostFacts, HostUsage
from jobs.core.job_details import Moment, Older
from jobs.models import Host, JoinToken
from jobs.queue.hosts import tokens
from jobs.queue.hosts.slots import held_slots
from jobs.queue.hosts.state import HostState, state_of


class HostBrief(TypedDict):
    """Where jobs run."""

    name: str
    state: Annotated[
        HostState,
        Field(description="`drained`: accepts no new jobs. `silent`: no contact for 30 s. `lost`: marked as lost."),
    ]
    device: str
    device_name: str
    slots: int
    free_slots: Annotated[int, Field(description="Number of slots that the queue can use now. 0 for a drained host.")]
    drained: bool
    note: Annotated[str, Field(description="Warning from the host, for example that jobs run as root.")]
    last_seen: Moment
    joined: Annotated[Moment | None, Field(description="Time when the host joined.")]
    calibrated: Annotated[Moment | None, Field(description="Time of the last calibration of the host.")]


class HeldSlot(TypedDict):
    """A slot that is not free."""

    slot: int
    job: Annotated[str | None, Field(description="Id of the job that uses the slot. null if you cannot see the job.")]


class HostDetail(HostBrief):
    """A host in full."""

    address: Annotated[
        str,
        Field(description="Address at which other hosts reach this host. Empty if unknown, or if you are not staff."),
    ]
    held: list[HeldSlot]
    facts: Annotated[
        HostFacts | Older | None,
        Field(description="Hardware that the host reported. Only staff see addresses and serial numbers."),
    ]
    use: Annotated[
        HostUsage | Older | None,
        Field(description="Load of the host at the last heartbeat. Only staff see file paths."),
    ]


class GivenUp(TypedDict):
    """How many attempts were lost with a host."""

    lost: int


class Token(TypedDict):
    """A join token, without its text."""

    id: int
    note: str
    created: Moment
    created_by: str
    expires: Moment
    most_uses: Annotated[
        int | None, Field(description="Maximum number of hosts that can join with the token. null: unlimited.")
    ]
    uses: int
    labels: Annotated[list[str], Field(description="Labels that a host gets when it joins with the token.")]
    last_used: Moment | None
    last_host: Annotated[str, Field(description="Last host that joined.")]
    problem: Annotated[str, Field(description="Reason why the token is invalid. Empty for a valid token.")]


class NewToken(Token):
    """A join token just made."""

    token: Annotated[
        str, Field(description="Text of the token, shown only once. Meshboard stores only a hash of the token.")
    ]


def host_brief(host: Host, free: int) -> HostBrief:
    """One line of a list; `free`: slots that the queue could give away now."""
    return {
        "name": host.name,
        "state": state_of(host),
        "device": host.device,
        "device_name": host.device_name,
        "slots": host.slots,
        "free_slots": free,
        "drained": host.drained,
        "note": host.note,
        "last_seen": host.last_seen.isoformat(),
        "joined": host.joined.isoformat() if host.joined else None,
        "calibrated": host.profiled.isoformat() if host.profiled else None,
    }


def host_detail(host: Host, user: Any, free: int) -> HostDetail:
    """With the ids of those jobs that the user may see."""
    held: list[HeldSlot] = [
        {"slot": slot, "job": job.id if job else None} for slot, job in held_slots([host], user)[host.pk]
    ]
    inside = sees_inside(user)
    return {
        **host_brief(host, free),
        "address": host.address if inside else "",
        "held": held,
        "facts": host.facts if inside or not host.facts else _outside(host.facts),
        "use": host.use if inside or not host.use else _without_paths(host.use),
    }


def sees_inside(user: Any) -> bool:
    """Whether a user is told of a host's addresses, paths and serial numbers: what nobody needs to run a job there."""
    return bool(user.is_active and user.is_staff)


def _outside(facts: dict[str, Any]) -> dict[str, Any]:
    nics = [{**nic, "addresses": []} for nic in facts.get("nics", [])]
    return {**facts, "nics": nics, "gpus": [{**gpu, "uuid": ""} for gpu in facts.get("gpus", [])]}


def _without_paths(use: dict[str, Any]) -> dict[str, Any]:
    return {**use, "disks": [{**disk, "path": ""} for disk in use.get("disks", [])]}


def token_told(token: JoinToken) -> Token:
    """For a list."""
    return {
        "id": token.pk,
        "note": token.note,
        "created": token.created.isoformat(),
        "created_by": token.created_by,
        "expires": token.expires.isoformat(),
        "most_uses": token.most_uses,
        "uses": token.uses,
        "labels": token.labels,
        "last_used": token.last_used.isoformat() if token.last_used else None,
        "last_host": token.last_host,
        "problem": tokens.why_not(token),
    }
