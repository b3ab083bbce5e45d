"""Order the messages between pipeline stages.

CUDA streams do not guarantee progress of concurrent kernels: a kernel can wait for all earlier kernels of any stream.
A receive that is posted too early can block the work that produces its message. To prevent that deadlock, all ranks
post messages in one global order, that of a simulated pipeline with unit times. Each message has a fixed place among
the actions of its rank.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple

from planner.facts.layout import get_chunk_indices, get_num_chunks
from planner.facts.schedules import Action, build_actions
from planner.facts.spec import Layout, Schedule

TIME_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Message(NamedTuple):
    """Hidden states into a chunk (F), or the gradient of its output (B)."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


class Exchange(NamedTuple):
    """Message from stage `sender` to stage `receiver`."""

    message: Message
    sender: int
    receiver: int


def get_sent_message(action: Action, last_chunk: int) -> Message | None:
    """Return the message that an action produces for the next chunk, if any."""
    if action.kind == "F":
        return Message("F", action.chunk + 1, action.micro_batch) if action.chunk < last_chunk else None
    if action.kind == "W" or action.chunk == 0:
        return None
    return Message("B", action.chunk - 1, action.micro_batch)


def get_received_message(action: Action, last_chunk: int) -> Message | None:
    """Return the message that an action needs, if any."""
    if action.kind == "F":
        return Message("F", action.chunk, action.micro_batch) if action.chunk > 0 else None
    if action.kind == "W" or action.chunk == last_chunk:
        return None
    return Message("B", action.chunk, action.micro_batch)


def get_chunk_stages(layout: Layout) -> dict[int, int]:
    """Return the stage of each chunk."""
    return {chunk: stage for stage in range(layout.pp) for chunk in get_chunk_indices(layout, stage)}


def get_links(layout: Layout) -> list[tuple[int, int]]:
    """Return the (sender, receiver) pairs in an order that cannot deadlock."""
    owner = get_chunk_stages(layout)
    ways = {(owner[chunk], owner[chunk + 1]) for chunk in range(get_num_chunks(layout) - 1)}
    both = ways | {(receiver, sender) for sender, receiver in ways}
    return sorted((link for link in both if link[0] != link[1]), key=lambda link: (sorted(link), link))


StageExchanges = tuple[tuple[Exchange, ...], ...]


def order_exchanges(layout: Layout, micro_batches: int, *, forwards: bool = False) -> tuple[StageExchanges, ...]:
    """Return the messages of each stage before its first action and after each action.

    A message is posted when it is available and the previous message of its sender is used. Each sender has at most one
    message ahead of its use.

    Args:
        forwards: Include only forwards, as in a validation.
    """
    owner, found = get_chunk_stages(layout), []
    for requests in order_requests(layout, micro_batches, forwards=forwards):
        slots: list[list[Exchange]] = [[] for _ in range(requests.num_slots)]
        for slot, code in zip(requests.slots, requests.codes, strict=True):
            chunk, micro_batch = divmod(code // 2, micro_batches)
            message = Message("B" if code % 2 else "F", chunk, micro_batch)
            sender = owner[chunk + (1 if code % 2 else -1)]
            slots[slot].append(Exchange(message, sender, owner[chunk]))
        found.append(tuple(map(tuple, slots)))
    return tuple(found)


class StageRequests(NamedTuple):
    """The messages that a stage sends and receives, in order: the slot of each and its code.

    Slot 0 is before the first action, and slot i after i actions. Arrays keep large pipelines small.
    """

    num_slots: int
    slots: array[int]
    codes: array[int]


def order_requests(layout: Layout, micro_batches: int, *, forwards: bool = False) -> tuple[StageRequests, ...]:
    """Return the messages of each stage as codes, in the order of `order_exchanges`.

    The code of a message is (chunk * micro_batches + micro_batch) * 2, plus 1 for a gradient.
    """
    return _order_requests(layout.schedule, layout.pp, layout.virtual_stages, micro_batches, forwards)


@lru_cache(maxsize=16)  # A search alternates between a few pipelines.
def _order_requests(
    schedule: Schedule, pp: int, virtual_stages: int, micro_batches: int, forwards: bool
) -> tuple[StageRequests, ...]:
    layout = Layout(schedule=schedule, pp=pp, virtual_stages=virtual_stages)
    lists = [build_actions(layout, stage, micro_batches) for stage in range(pp)]
    if forwards:
        lists = [[action for action in order if action.kind == "F"] for order in lists]
    clock = _PipelineClock(layout, lists, micro_batches)
    clock.run()
    found = tuple(StageRequests(len(order) + 1, array("q"), array("q")) for order in lists)
    # A stable sort keeps the order per link.
    for posted_at, code, sender, receiver in sorted(clock.iterate_messages(), key=itemgetter(0)):
        for stage in (sender, receiver):
            found[stage].slots.append(bisect.bisect_right(clock.ends[stage], posted_at))
            found[stage].codes.append(code)
    return found


NO_MESSAGE = -1


class _PipelineClock:
    """Simulated end of each action and post time of each message.

    An integer code identifies a message, because a pipeline can have hundreds of thousands.
    """

    def __init__(self, layout: Layout, lists: Sequence[Sequence[Action]], micro_batches: int) -> None:
        self.ends: list[list[int]] = [[] for _ in lists]
        owner, last = get_chunk_stages(layout), get_num_chunks(layout) - 1
        self._units = [[TIME_UNITS[action.kind] for action in order] for order in lists]
        self._sent_codes: list[list[int]] = []
        self._received_codes: list[list[int]] = []
        num_codes = (last + 2) * micro_batches * 2
        self._produced_at: list[int | None] = [None] * num_codes
        # Time when a receiver can use a message: posted, or produced by its own stage.
        self._available_at: list[int | None] = [None] * num_codes
        self._is_own = [True] * num_codes
        self._links: dict[tuple[int, int], list[int]] = {}
        self._messages: list[tuple[int, int, int]] = []  # (code, sender, receiver)
        for stage, order in enumerate(lists):
            sent_codes, received_codes = [], []
            for kind, micro_batch, chunk in order:
                sent, received, peer = NO_MESSAGE, NO_MESSAGE, stage
                if kind == "F":
                    if chunk < last:
                        sent, peer = ((chunk + 1) * micro_batches + micro_batch) * 2, owner[chunk + 1]
                    if chunk:
                        received = (chunk * micro_batches + micro_batch) * 2
                elif kind != "W":
                    if chunk:
                        sent, peer = ((chunk - 1) * micro_batches + micro_batch) * 2 + 1, owner[chunk - 1]
                    if chunk < last:
                        received = (chunk * micro_batches + micro_batch) * 2 + 1
                sent_codes.append(sent)
                received_codes.append(received)
                if peer != stage:
                    self._is_own[sent] = False
                    self._links.setdefault((stage, peer), []).append(sent)
                    self._messages.append((sent, stage, peer))
            self._sent_codes.append(sent_codes)
            self._received_codes.append(received_codes)
        self._waiting_actions = {link: self._find_waiting_actions(link) for link in self._links}
        self._counts = dict.fromkeys(self._links, 0)
        self._stage_links = [[link for link in self._links if stage in link] for stage in range(len(lists))]

    def run(self) -> None:
        todo = dict.fromkeys(range(len(self.ends)))  # Stages that can continue.
        while todo:
            stage = next(iter(todo))
            del todo[stage]
            self._run_actions(stage)
            todo.update(dict.fromkeys(link[1] for link in self._stage_links[stage] if self._post_messages(link)))
        assert all(len(ends) == len(units) for ends, units in zip(self.ends, self._units, strict=True))

    def iterate_messages(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the post time, code, sender, and receiver of each message between stages."""
        for code, sender, receiver in self._messages:
            posted_at = self._available_at[code]
            assert posted_at is not None
            yield posted_at, code, sender, receiver

    def _find_waiting_actions(self, link: tuple[int, int]) -> list[int]:
        """Return the receiver's first action that needs each message of a link or a later one."""
        order = {code: index for index, code in enumerate(self._links[link])}
        actions: list[int] = []
        for index, code in enumerate(self._received_codes[link[1]]):
            actions += [index] * (order.get(code, NO_MESSAGE) + 1 - len(actions))
        return actions

    def _post_messages(self, link: tuple[int, int]) -> bool:
        """Set the post times of a link's next messages. Return whether there are any."""
        messages, ends, waiting = self._links[link], self.ends[link[1]], self._waiting_actions[link]
        first = count = self._counts[link]
        while count < len(messages) and (time := self._produced_at[messages[count]]) is not None:
            if count:
                num_before = waiting[count - 1]
                if len(ends) < num_before:
                    break
                time = max(
                    time, ends[num_before - 1] if num_before else 0, self._available_at[messages[count - 1]] or 0
                )
            self._available_at[messages[count]] = time
            count += 1
        self._counts[link] = count
        return count > first

    def _run_actions(self, stage: int) -> None:
        """Run all actions of a stage whose messages are available."""
        ends, units = self.ends[stage], self._units[stage]
        sent, received = self._sent_codes[stage], self._received_codes[stage]
        now = ends[-1] if ends else 0
        for index in range(len(ends), len(units)):
            if received[index] != NO_MESSAGE:
                available_at = self._available_at[received[index]]
                if available_at is None:
                    return
                now = max(now, available_at)
            now += units[index]
            ends.append(now)
            if sent[index] != NO_MESSAGE:
                self._produced_at[sent[index]] = now
                if self._is_own[sent[index]]:
                    self._available_at[sent[index]] = now
