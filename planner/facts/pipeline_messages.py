"""What stages of a pipe send one another, and when the two ranks of a message ask for it.

CUDA promises nothing of streams beside each other: on a GPU what is asked for may have to wait for all that was asked
for before, on whatever stream. A receive that is posted ahead of its message may so keep back the very work that the
message comes from. So all ranks ask for messages in one order, that of a pipe whose work takes whole units of time, and
each in its place among what it computes: then nobody waits for what its peer asks for only afterwards.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from planner.facts.layout import chunk_indices, num_chunks
from planner.facts.schedules import Action, actions
from planner.facts.spec import Layout, Schedule

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Message(NamedTuple):
    """Hidden states into a chunk (F), or the gradient of its output (B)."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


class Exchange(NamedTuple):
    """A message that leaves stage `sender` for stage `receiver`."""

    message: Message
    sender: int
    receiver: int


def given_by(action: Action, last_chunk: int) -> Message | None:
    """What an action gives to the chunk after or before it, if anything."""
    if action.kind == "F":
        return Message("F", action.chunk + 1, action.micro_batch) if action.chunk < last_chunk else None
    if action.kind == "W" or action.chunk == 0:
        return None
    return Message("B", action.chunk - 1, action.micro_batch)


def needed_by(action: Action, last_chunk: int) -> Message | None:
    """What an action begins with, if anything."""
    if action.kind == "F":
        return Message("F", action.chunk, action.micro_batch) if action.chunk > 0 else None
    if action.kind == "W" or action.chunk == last_chunk:
        return None
    return Message("B", action.chunk, action.micro_batch)


def owners(layout: Layout) -> dict[int, int]:
    """Stage by chunk."""
    return {chunk: stage for stage in range(layout.pp) for chunk in chunk_indices(layout, stage)}


def links(layout: Layout) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages, by stage, in an order in which each rank can meet the other of its own."""
    owner = owners(layout)
    ways = {(owner[chunk], owner[chunk + 1]) for chunk in range(num_chunks(layout) - 1)}
    both = ways | {(receiver, sender) for sender, receiver in ways}
    return sorted((link for link in both if link[0] != link[1]), key=lambda link: (sorted(link), link))


Slots = tuple[tuple[Exchange, ...], ...]


def exchanges(layout: Layout, micro_batches: int, *, forwards: bool = False) -> tuple[Slots, ...]:
    """By stage, what it sends and receives, in order: before its first action, and after each; with `forwards` of its
    forwards alone, as in a validation.

    A message is asked for once it is there and the one before it, of the same sender, is waited for: from each sender
    one stands ready ahead of its use.
    """
    return _exchanges(layout.schedule, layout.pp, layout.virtual_stages, micro_batches, forwards)


@lru_cache(maxsize=4)  # of a large pipe they take some tens of megabytes
def _exchanges(
    schedule: Schedule, pp: int, virtual_stages: int, micro_batches: int, forwards: bool
) -> tuple[Slots, ...]:
    layout = Layout(schedule=schedule, pp=pp, virtual_stages=virtual_stages)
    lists = [actions(layout, stage, micro_batches) for stage in range(pp)]
    if forwards:
        lists = [[action for action in order if action.kind == "F"] for order in lists]
    pipe = _Timed(layout, lists)
    pipe.run()
    found: list[list[list[Exchange]]] = [[[] for _ in range(len(order) + 1)] for order in lists]
    for exchange, when in sorted(pipe.asked(), key=lambda item: item[1]):  # stable: those of a link stay in order
        for side in (exchange.sender, exchange.receiver):
            found[side][bisect.bisect_right(pipe.ends[side], when)].append(exchange)
    return tuple(tuple(map(tuple, slots)) for slots in found)


NOTHING = -1


class _Timed:
    """When a pipe's actions end and its messages are asked for, each action taking its units.

    A message has a place among all that there are, by which times are kept: pipes have hundreds of thousands.
    """

    def __init__(self, layout: Layout, lists: Sequence[Sequence[Action]]) -> None:
        self.ends: list[list[int]] = [[] for _ in lists]
        owner, last = owners(layout), num_chunks(layout) - 1
        micro_batches = 1 + max((action.micro_batch for order in lists for action in order), default=0)

        def place(message: Message | None) -> int:
            if message is None:
                return NOTHING
            return (message.chunk * micro_batches + message.micro_batch) * 2 + (message.kind == "B")

        self._units = [[UNITS[action.kind] for action in order] for order in lists]
        self._gives = [[place(given_by(action, last)) for action in order] for order in lists]
        self._needs = [[place(needed_by(action, last)) for action in order] for order in lists]
        number = (last + 2) * micro_batches * 2
        self._given: list[int | None] = [None] * number
        self._there: list[int | None] = [None] * number  # when it may be begun with: asked for, or given by this rank
        self._is_own = [True] * number
        self._links: dict[tuple[int, int], list[int]] = {}
        self._exchanges: dict[int, Exchange] = {}
        for stage, order in enumerate(lists):
            for action, code in zip(order, self._gives[stage], strict=True):
                message = given_by(action, last)
                if message is not None and owner[message.chunk] != stage:
                    self._is_own[code] = False
                    self._links.setdefault((stage, owner[message.chunk]), []).append(code)
                    self._exchanges[code] = Exchange(message, stage, owner[message.chunk])
        self._waited = {link: self._waited_for(link) for link in self._links}
        self._counts = dict.fromkeys(self._links, 0)
        self._links_of = [[link for link in self._links if stage in link] for stage in range(len(lists))]

    def run(self) -> None:
        todo = dict.fromkeys(range(len(self.ends)))  # stages that may go on, each once
        while todo:
            stage = next(iter(todo))
            del todo[stage]
            self._compute(stage)
            todo.update(dict.fromkeys(link[1] for link in self._links_of[stage] if self._ask(link)))
        assert all(len(ends) == len(units) for ends, units in zip(self.ends, self._units, strict=True))

    def asked(self) -> Iterator[tuple[Exchange, int]]:
        """(what passes between stages, when it is asked for)"""
        for code, exchange in self._exchanges.items():
            when = self._there[code]
            assert when is not None
            yield exchange, when

    def _waited_for(self, link: tuple[int, int]) -> list[int]:
        """Of each message of a link, the receiver's action, by index, that waits for it or for one sent later."""
        order = {code: index for index, code in enumerate(self._links[link])}
        found: list[int] = []
        for index, code in enumerate(self._needs[link[1]]):
            found += [index] * (order.get(code, NOTHING) + 1 - len(found))
        return found

    def _ask(self, link: tuple[int, int]) -> bool:
        """Whether more of a link's messages have their time by now."""
        messages, ends, waited = self._links[link], self.ends[link[1]], self._waited[link]
        first = count = self._counts[link]
        while count < len(messages) and (when := self._given[messages[count]]) is not None:
            if count:
                before = waited[count - 1]
                if len(ends) < before:
                    break
                when = max(when, ends[before - 1] if before else 0, self._there[messages[count - 1]] or 0)
            self._there[messages[count]] = when
            count += 1
        self._counts[link] = count
        return count > first

    def _compute(self, stage: int) -> None:
        """All actions of a stage that can be done by now."""
        ends, units, gives, needs = self.ends[stage], self._units[stage], self._gives[stage], self._needs[stage]
        now = ends[-1] if ends else 0
        for index in range(len(ends), len(units)):
            if needs[index] != NOTHING:
                there = self._there[needs[index]]
                if there is None:
                    return
                now = max(now, there)
            now += units[index]
            ends.append(now)
            if gives[index] != NOTHING:
                self._given[gives[index]] = now
                if self._is_own[gives[index]]:
                    self._there[gives[index]] = now
