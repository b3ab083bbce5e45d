"""What a host is and how it fares, as it says so itself. Every text and every list is bounded: the board stores them.

Absent is not 0: what a machine does not tell is left out, never made up.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import Count, Number, Seconds, Slot, Word

Percent = Annotated[float, Field(ge=0, le=100)]
Celsius = Annotated[float, Field(ge=-100, le=1000)]
Watts = Annotated[float, Field(ge=0, le=100_000)]


class SlotFacts(TypedDict):
    """One GPU."""

    model: Word
    memory_bytes: Count
    uuid: Word
    numa: NotRequired[Count]  # the node its bus hangs on


class GpuLink(TypedDict):
    """How two GPUs reach each other, in the words of `nvidia-smi topo -m`: NV4, PIX, PXB, PHB, NODE, SYS."""

    a: Slot
    b: Slot
    kind: Annotated[str, Field(pattern=r"^[A-Z0-9]{1,8}$")]


class Nic(TypedDict):
    """A network interface that is up."""

    name: Word
    addresses: Annotated[list[Word], Field(max_length=8)]
    megabits_per_s: NotRequired[Count]


class Versions(TypedDict):
    """Of what is installed; `cuda` is the newest that the driver takes."""

    python: Word
    meshboard: NotRequired[Word]
    torch: NotRequired[Word]
    nccl: NotRequired[Word]
    driver: NotRequired[Word]
    cuda: NotRequired[Word]


# How a core computes products in bf16: by instructions of its own, widened to AVX-512's fp32, or one element at a time.
CoreBf16 = Literal["native", "widened", "scalar"]


class HostFacts(TypedDict):
    """What changes seldom; told with the first heartbeat and about once a minute."""

    cores: Count
    bf16: NotRequired[CoreBf16]
    memory_bytes: Count  # of the machine
    numa_nodes: Count
    gpus: Annotated[list[SlotFacts], Field(max_length=64)]  # empty on a CPU
    links: Annotated[list[GpuLink], Field(max_length=2016)]  # of every pair of 64 GPUs
    nics: Annotated[list[Nic], Field(max_length=32)]
    versions: Versions


class Disk(TypedDict):
    """The disk that a folder lies on."""

    use: Literal["runs", "checkpoints"]
    path: Word
    free_bytes: Count
    total_bytes: Count


class GpuUse(TypedDict):
    """One GPU now."""

    busy_percent: NotRequired[Percent]
    memory_bytes: NotRequired[Count]
    celsius: NotRequired[Celsius]
    watts: NotRequired[Watts]


class Use(TypedDict):
    """How the host fares now; told with each heartbeat."""

    busy_percent: NotRequired[Percent]  # of all its cores, since the last heartbeat
    load: NotRequired[Seconds]  # processes that want to run, over the last minute
    memory_bytes: NotRequired[Count]  # in use
    gpus: Annotated[list[GpuUse], Field(max_length=64)]
    disks: Annotated[list[Disk], Field(max_length=2)]
    clock_offset_s: NotRequired[Number]  # its clock less Redis', by the middle of a round trip
    round_trip_s: NotRequired[Seconds]  # of that one: the offset is known to half of it
