"""How a machine becomes a host: what it says to POST /api/v1/hosts/join, and what it hears."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.facts import HostFacts
from contracts.fields import Count, HostName, Word

JOIN_PATH = "/api/v1/hosts/join"
Secret = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]


class JoinRequest(TypedDict):
    """A token makes a host of a machine. Its identity, random and its own, shows later that it still is that host."""

    name: HostName
    identity: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{32,200}$")]
    token: NotRequired[Secret]
    slots: Annotated[int, Field(ge=1, le=65536)]
    device: Literal["cpu", "cuda"]
    device_name: Word
    memory_bytes: Count  # per slot
    boot_id: Word
    facts: NotRequired[HostFacts]


class Joined(TypedDict):
    """What makes a host of a machine: kept by it in a file that nobody else reads."""

    name: HostName
    redis_url: str  # with a user and a password of the host's own
    key: str  # signs what it says, hexadecimal
