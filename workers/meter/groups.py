"""A process group as this rank knows it, what is on its way there, and by what all its ranks know it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from contracts.telemetry.timeline import GroupRanks
from contracts.telemetry.vocabulary import Label, Op, Phase
from workers.meter.shares import Share

MAX_GROUPS = 4096  # with the same ranks; those made later cannot be told from the last of them

Key = tuple[Phase, Op, Label, int]


class Counters:
    """Running totals of one (phase, op, axis, group size)."""

    __slots__ = ("busy_s", "completed", "count", "payload_bytes", "uneven_bytes", "uneven_sent_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.completed = 0
        self.payload_bytes = 0
        self.uneven_bytes = 0  # of the payload, what ranks share unevenly
        self.uneven_sent_bytes = 0  # of that, what left this rank
        self.busy_s = 0.0


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

    def take_back(self, op: Op, peer: int) -> None:
        """What was numbered last, and has ended, was none."""
        if op == "send" or op == "recv":
            self.passed[op, peer] -= 1
            return
        self.issued -= 1
        self.ended -= 1


class Counting(Protocol):
    """What counts the collectives of a rank: its recorder."""

    step: int
    waits_for: Pending | None

    def complete(self, pending: Pending, duration_s: float) -> None: ...
    def give_up(self, pending: Pending) -> None: ...


class Pending:
    """A collective on its way. Calling it (as a future's callback does) says that it is complete.

    Seconds are those of `time.perf_counter`. `blocked_s`: of its time, what the training thread stood still for it.
    `share`: of the step that it is part of, None outside of one.
    """

    __slots__ = (
        "_recorder",
        "blocked_s",
        "counters",
        "ended_s",
        "group",
        "key",
        "number",
        "payload_bytes",
        "peer",
        "recorder",
        "share",
        "started_s",
        "step",
    )

    def __init__(
        self, recorder: Counting, key: Key, counters: Counters, group: Group, payload_bytes: int, peer: int
    ) -> None:
        self.recorder = recorder
        self._recorder: Counting | None = recorder  # until it is complete
        self.key, self.counters, self.group, self.payload_bytes, self.peer = key, counters, group, payload_bytes, peer
        self.number = group.number(key[1], peer)
        self.share: Share | None = None
        self.step = recorder.step
        self.blocked_s = self.ended_s = 0.0
        self.started_s = time.perf_counter()

    def __call__(self, _future: object = None) -> None:
        self.complete(time.perf_counter() - self.started_s)

    def complete(self, duration_s: float) -> None:
        """Count it once; later calls change nothing (a work may be waited for twice)."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.complete(self, duration_s)

    def give_up(self) -> None:
        """Its end will not be heard of; where it was, this changes nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.give_up(self)

    def stood(self, seconds: float) -> None:
        """So long the training thread did nothing else."""
        self.blocked_s += seconds
        share = self.share
        if share is not None:
            share.exposed_s += seconds
            if self.key[1] != "recv":
                share.stood_s += seconds


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
