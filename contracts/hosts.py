"""Facts and usage of a host, and the messages by which a machine joins as a host.

All texts and lists are bounded, because the board stores them. A host omits a value that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.fields import Count, HostName, Number, Seconds, ShortText, Slot, Text

JOIN_PATH = "/api/v1/hosts/join"

Percent = Annotated[float, Field(ge=0, le=100)]
Celsius = Annotated[float, Field(ge=-100, le=1000)]
Watts = Annotated[float, Field(ge=0, le=100_000)]
JoinToken = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]
# The bf16 arithmetic of a core: own instructions, conversion to AVX-512's fp32, or one element at a time.
CoreBf16 = Literal["native", "widened", "scalar"]


class GpuFacts(TypedDict):
    """One GPU."""

    model: ShortText
    memory_bytes: Count
    uuid: ShortText
    numa: NotRequired[Count]  # NUMA node of its bus


class GpuLink(TypedDict):
    """Link of two GPUs, in the terms of `nvidia-smi topo -m`: NV4, PIX, PXB, PHB, NODE, SYS."""

    a: Slot
    b: Slot
    kind: Annotated[str, Field(pattern=r"^[A-Z0-9]{1,8}$")]


class NetworkInterface(TypedDict):
    """A network interface that is up."""

    name: ShortText
    addresses: Annotated[list[ShortText], Field(max_length=8)]
    megabits_per_s: NotRequired[Count]


class SoftwareVersions(TypedDict):
    """Versions of installed software. `cuda` is the newest version that the driver supports."""

    python: ShortText
    meshboard: NotRequired[ShortText]
    torch: NotRequired[ShortText]
    nccl: NotRequired[ShortText]
    driver: NotRequired[ShortText]
    cuda: NotRequired[ShortText]


class HostFacts(TypedDict):
    """Hardware and software of a host, sent with the first heartbeat and about once per minute."""

    cores: Count
    bf16: NotRequired[CoreBf16]
    memory_bytes: Count  # of the machine
    numa_nodes: Count
    gpus: Annotated[list[GpuFacts], Field(max_length=64)]  # empty on a CPU host
    links: Annotated[list[GpuLink], Field(max_length=2016)]  # all pairs of 64 GPUs
    nics: Annotated[list[NetworkInterface], Field(max_length=32)]
    versions: SoftwareVersions
    limits: NotRequired[Text]  # of each job, with the mechanism of each limit


class DiskUsage(TypedDict):
    """Usage of the disk of a folder."""

    use: Literal["runs", "checkpoints"]
    path: ShortText
    free_bytes: Count
    total_bytes: Count


class GpuUsage(TypedDict):
    """Current usage of one GPU."""

    busy_percent: NotRequired[Percent]
    memory_bytes: NotRequired[Count]
    celsius: NotRequired[Celsius]
    watts: NotRequired[Watts]


class HostUsage(TypedDict):
    """Current usage of a host, sent with each heartbeat."""

    busy_percent: NotRequired[Percent]  # of all cores, since the last heartbeat
    load: NotRequired[Seconds]  # runnable processes, mean of the last minute
    memory_bytes: NotRequired[Count]  # in use
    gpus: Annotated[list[GpuUsage], Field(max_length=64)]
    disks: Annotated[list[DiskUsage], Field(max_length=2)]
    clock_offset_s: NotRequired[Number]  # clock of the host minus clock of Redis, at the middle of a round trip
    round_trip_s: NotRequired[Seconds]  # of this measurement, which is accurate to half of it


class JoinRequest(TypedDict):
    """Request of a machine to become a host. The random `identity` later proves that it is the same host."""

    name: HostName
    identity: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{32,200}$")]
    token: NotRequired[JoinToken]
    slots: Annotated[int, Field(ge=1, le=65536)]
    device: Literal["cpu", "cuda"]
    device_name: ShortText
    memory_bytes: Count  # per slot
    boot_id: ShortText
    facts: NotRequired[HostFacts]


class JoinResponse(TypedDict):
    """Credentials of a new host, which it stores in a private file."""

    name: HostName
    redis_url: str  # with the user and password of this host
    key: str  # signs messages of the host, hexadecimal
