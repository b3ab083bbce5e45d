"""What stages of a pipe send one another, and when the two ranks of a message ask for it.

CUDA promises nothing of streams beside each other: on a GPU what is asked for may have to wait for all that was asked
for before, on whatever stream. A receive that is posted ahead of its message may so keep back the very work that the
message comes from. So all ranks ask for messages in one order, that of a pipe whose work takes whole units of time, and
each in its place among what it computes: then nobody waits for what its peer asks for only afterwards.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from planner.facts.layout import chunk_indices, num_chunks
from planner.facts.schedules import Action
from planner.facts.spec import Layout

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


def exchanges(layout: Layout, lists: Sequence[Sequence[Action]]) -> list[list[list[Exchange]]]:
    """By stage, what it sends and receives, in order: before its first action, and after each. `lists`: their actions.

    A message is asked for once it is there and the one before it, of the same sender, is waited for: from each sender
    one stands ready ahead of its use.
    """
    ends, asked = _Timed(layout, lists).run()
    found: list[list[list[Exchange]]] = [[[] for _ in range(len(order) + 1)] for order in lists]
    for exchange, when in sorted(asked.items(), key=lambda item: item[1]):  # stable: those of a link stay in order
        for side in (exchange.sender, exchange.receiver):
            found[side][bisect.bisect_right(ends[side], when)].append(exchange)
    return found


class _Timed:
    """When a pipe's actions end and its messages are asked for, each action taking its units."""

    def __init__(self, layout: Layout, lists: Sequence[Sequence[Action]]) -> None:
        self._lists, self._last = lists, num_chunks(layout) - 1
        self._ends: list[list[int]] = [[] for _ in lists]
        self._given: dict[Message, int] = {}
        self._asked: dict[Exchange, int] = {}
        owner = owners(layout)
        self._links: defaultdict[tuple[int, int], list[Exchange]] = defaultdict(list)
        self._needs: list[list[tuple[Message, Exchange | None] | None]] = [[] for _ in lists]
        for stage, order in enumerate(lists):
            for action in order:
                given = given_by(action, self._last)
                if given is not None and owner[given.chunk] != stage:
                    self._links[stage, owner[given.chunk]].append(Exchange(given, stage, owner[given.chunk]))
        exchange_of = {exchange.message: exchange for link in self._links.values() for exchange in link}
        for stage, order in enumerate(lists):
            messages = (needed_by(action, self._last) for action in order)
            self._needs[stage] = [None if m is None else (m, exchange_of.get(m)) for m in messages]
        self._waited = {link: self._waited_for(link) for link in self._links}
        self._counts = dict.fromkeys(self._links, 0)

    def run(self) -> tuple[list[list[int]], dict[Exchange, int]]:
        """(ends of each stage's actions, when each message is asked for)"""
        todo = dict.fromkeys(range(len(self._lists)))  # stages that may go on, each once
        while todo:
            stage = next(iter(todo))
            del todo[stage]
            self._compute(stage)
            todo.update(dict.fromkeys(link[1] for link in self._links if stage in link and self._ask(link)))
        assert all(len(ends) == len(order) for ends, order in zip(self._ends, self._lists, strict=True))
        return self._ends, self._asked

    def _waited_for(self, link: tuple[int, int]) -> list[int]:
        """Of each message of a link, the receiver's action, by index, that waits for it or for one sent later."""
        place = {exchange: index for index, exchange in enumerate(self._links[link])}
        found: list[int] = []
        for index, need in enumerate(self._needs[link[1]]):
            if need is not None and need[1] in place:
                found += [index] * (place[need[1]] + 1 - len(found))
        return found

    def _ask(self, link: tuple[int, int]) -> bool:
        """Whether more of a link's messages have their time by now."""
        messages, ends, waited = self._links[link], self._ends[link[1]], self._waited[link]
        first = count = self._counts[link]
        while count < len(messages) and (when := self._given.get(messages[count].message)) is not None:
            if count:
                before = waited[count - 1]
                if len(ends) < before:
                    break
                when = max(when, ends[before - 1] if before else 0, self._asked[messages[count - 1]])
            self._asked[messages[count]] = when
            count += 1
        self._counts[link] = count
        return count > first

    def _compute(self, stage: int) -> None:
        """All actions of a stage that can be done by now."""
        order, needs, ends = self._lists[stage], self._needs[stage], self._ends[stage]
        while len(ends) < len(order) and (there := self._there(needs[len(ends)])) is not None:
            action = order[len(ends)]
            ends.append(max(there, ends[-1] if ends else 0) + UNITS[action.kind])
            given = given_by(action, self._last)
            if given is not None:
                self._given[given] = ends[-1]

    def _there(self, need: tuple[Message, Exchange | None] | None) -> int | None:
        """When what is needed is there, if that is known yet."""
        if need is None:
            return 0
        message, exchange = need
        return self._given.get(message) if exchange is None else self._asked.get(exchange)
