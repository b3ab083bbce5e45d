"""Where ranks may be placed: a host alone, or several together with every tensor-parallel group inside one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from planner.facts.gang import whole
from planner.facts.words import counted
from planner.search.layouts import divisors


class Room(NamedTuple):
    """A host that ranks may be placed on: how many, and the memory each has."""

    slots: int
    memory_bytes: int


class Gang(NamedTuple):
    """Hosts of one model that ranks may be spread over: slots of each, the largest first, and the least memory."""

    sizes: tuple[int, ...]
    memory_bytes: int

    def holds(self, ranks: int, tp: int) -> bool:
        """Whether so many have room with each tensor-parallel group inside a host."""
        return sum(whole(slots, tp) for slots in self.sizes) >= ranks


class Rooms(NamedTuple):
    """All there is; of `alone` there is at least one."""

    alone: Sequence[Room]
    gangs: Sequence[Gang] = ()

    @property
    def most(self) -> int:
        """Ranks that have room at once."""
        return max([*(room.slots for room in self.alone), *(sum(gang.sizes) for gang in self.gangs)])

    def full(self) -> set[int]:
        """Ranks that fill the largest 1, 2, 4, ... hosts of a gang."""
        return {sum(gang.sizes[: 1 << k]) for gang in self.gangs for k in range(len(gang.sizes).bit_length())}

    def inside(self, ranks: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What is fixed of a layout so that tp stays inside a host: nothing more where a host holds all the ranks."""
        if any(room.slots >= ranks for room in self.alone):
            yield {**fixed}
            return
        largest = max(gang.sizes[0] for gang in self.gangs)
        for tp in [fixed["tp"]] if "tp" in fixed else [t for t in divisors(ranks) if t <= largest]:
            if any(gang.holds(ranks, tp) for gang in self.gangs):
                yield {**fixed, "tp": tp}

    def memory_bytes(self, ranks: int) -> int:
        """The least that a rank has wherever so many may be placed."""
        alone = [room.memory_bytes for room in self.alone if room.slots >= ranks]
        return min(alone or [gang.memory_bytes for gang in self.gangs if gang.holds(ranks, 1)])

    def words(self) -> str:
        """How many slots there are."""
        text = f"the largest host has {counted(max(room.slots for room in self.alone), 'slot')}"
        if not self.gangs:
            return text
        sizes = max((gang.sizes for gang in self.gangs), key=sum)
        return f"{text}, and {len(sizes)} hosts of the same hardware model have {sum(sizes)} slots in total"
