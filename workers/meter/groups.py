"""A process group as this rank knows it, and by what all its ranks know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contracts.telemetry import GroupRanks, Label, Op

if TYPE_CHECKING:
    from workers.meter.recorder import Pending

MAX_GROUPS = 4096  # with the same ranks; those made later cannot be told from the last of them


class Group:
    """Counts what this rank issued on it. All ranks of a group issue the same collectives in the same order, so the
    number of one is the same on all; a send's is of those to that rank, and the same as its receive's there."""

    __slots__ = ("ended", "flying", "issued", "made", "name", "on_device", "passed", "ranks")

    def __init__(self, name: str, ranks: tuple[int, ...], made: int, on_device: bool) -> None:
        self.name, self.ranks, self.made, self.on_device = name, ranks, made, on_device
        self.issued = self.ended = 0  # collectives, without sends and receives
        self.passed: dict[tuple[Op, int], int] = {}  # sends and receives by the rank at the other end
        self.flying: dict[Pending, None] = {}  # on their way, the oldest first

    def number(self, op: Op, peer: int) -> int:
        """Of the operation that is being issued."""
        if op != "send" and op != "recv":
            self.issued += 1
            return self.issued
        passed = self.passed[op, peer] = self.passed.get((op, peer), 0) + 1
        return passed


class Groups:
    """Of one rank, by the name that torch gives them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Group] = {}
        self._made: dict[tuple[int, ...], list[str]] = {}

    def join(self, name: str, ranks: Sequence[int], *, on_device: bool = False) -> Group:
        """A group has been made; it takes the place of an earlier one of the same name."""
        alike = self._made.setdefault(tuple(ranks), [])
        group = self._by_name[name] = Group(name, tuple(ranks), len(alike), on_device)
        if len(alike) < MAX_GROUPS:
            alike.append(name)
        return group

    def rename(self, group: Group, name: str) -> None:
        """Torch has given it another name than it was made with."""
        if group.name == name:
            return
        if self._by_name.get(group.name) is group:
            del self._by_name[group.name]
        if group.made < MAX_GROUPS:
            self._made[group.ranks][group.made] = name
        group.name = name
        self._by_name[name] = group

    def find(self, name: str, size: int) -> Group:
        """One that nobody told of has the first ranks."""
        group = self._by_name.get(name)
        return self.join(name, range(size)) if group is None else group

    def all(self) -> list[Group]:
        return list(self._by_name.values())

    def identity(self, group: Group, axis_of: Callable[[str], Label]) -> GroupRanks:
        axis = axis_of(group.name)
        earlier = self._made[group.ranks][: group.made]
        nth = sum(axis_of(name) == axis for name in earlier)
        return GroupRanks(axis=axis, ranks=list(group.ranks), nth=nth)
