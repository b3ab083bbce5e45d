"""A step of all ranks, event by event, on the board's clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from contracts.telemetry.timeline import TimelineItem
from contracts.telemetry.vocabulary import Op
from jobs.runs.diagnosis.events.clocks import Clocks

MOST_HELD = 400_000  # events of steps that not all ranks told yet; the oldest step goes first
US = 1e-6
ENDS_AT_ONCE_S = 2e-3  # a span that ends so soon after a collective stood still for it
OTHER = "other"
PAIRED = ("send", "recv")


class Group(NamedTuple):
    """As all its ranks know it."""

    axis: str
    ranks: tuple[int, ...]
    nth: int


class Call(NamedTuple):
    """A collective on one rank. The training thread stood still for it in the last `blocked_s` before `ended`."""

    rank: int
    group: Group
    op: Op
    sequence: int
    issued: float
    blocked_s: float
    ended: float
    payload_bytes: int
    peer: int


class Span(NamedTuple):
    """What a training thread did. Chunk and micro-batch are -1 where none applies."""

    work: str
    chunk: int
    micro_batch: int
    began: float
    ended: float


class RankStep(NamedTuple):
    """A step of one rank. `inferred_s`: by axis, what it stood still for inside torch, which the meter cannot see."""

    rank: int
    node: int
    began: float
    step_s: float
    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    inferred_s: dict[str, float]


class Step(NamedTuple):
    """A step as all its ranks told it."""

    number: int
    ranks: dict[int, RankStep]

    @property
    def step_s(self) -> float:
        return max(one.step_s for one in self.ranks.values())


class Gathering:
    """Steps until all ranks have told theirs."""

    def __init__(self, world_size: int, clocks: Clocks) -> None:
        self._world_size, self._clocks = world_size, clocks
        self._held: dict[int, dict[int, RankStep]] = {}
        self._events = 0

    def add(self, item: TimelineItem, node: int) -> Step | None:
        """The step, once this was the last rank's."""
        told = read(item, node, self._clocks)
        ranks = self._held.setdefault(item["step"], {})
        self._events += _size(told) - (_size(ranks[told.rank]) if told.rank in ranks else 0)
        ranks[told.rank] = told
        if len(ranks) == self._world_size:
            self._drop(item["step"])
            return Step(item["step"], ranks)
        while self._events > MOST_HELD and len(self._held) > 1:
            self._drop(min(self._held))
        return None

    def _drop(self, step: int) -> None:
        self._events -= sum(map(_size, self._held.pop(step).values()))


def _size(told: RankStep) -> int:
    return len(told.calls) + len(told.spans) + 1


def read(item: TimelineItem, node: int, clocks: Clocks) -> RankStep:
    """The columns as rows, on the board's clock. A rank validates and saves after its step: none of that is of it."""
    began, rank = clocks.board(node, item["began"]), item["rank"]
    over = item["step_s"] / US
    groups = [Group(group["axis"], tuple(group["ranks"]), group["nth"]) for group in item["groups"]]
    told, done = item["calls"], item["spans"]
    calls = [
        Call(rank, groups[place], op, sequence, began + at * US, blocked * US, began + ended * US, size, peer)
        for place, op, sequence, at, blocked, ended, size, peer in zip(
            *(told["group"], told["op"], told["sequence"], told["issued_us"]),
            *(told["blocked_us"], told["ended_us"], told["payload_bytes"], told["peer"]),
            strict=True,
        )
        if at <= over
    ]
    spans = tuple(
        Span(work, chunk, micro_batch, began + start * US, began + end * US)
        for work, chunk, micro_batch, start, end in zip(
            done["work"], done["chunk"], done["micro_batch"], done["from_us"], done["to_us"], strict=True
        )
        if start <= over
    )
    inferred = dict(_inferred(calls, spans))
    stood: dict[str, float] = {}
    for place, blocked_s in inferred.items():
        stood[calls[place].group.axis] = stood.get(calls[place].group.axis, 0.0) + blocked_s
        calls[place] = calls[place]._replace(blocked_s=blocked_s)
    return RankStep(rank, node, began, item["step_s"], tuple(calls), spans, stood)


def _inferred(calls: list[Call], spans: Iterable[Span]) -> Iterator[tuple[int, float]]:
    """(place of a call, what was stood still for it) where DDP's reducer waits in its own C++.

    It issues its last bucket as the last gradient is there and ends its backward as soon as all buckets are summed: a
    backward that ends with the last of them stood still from the last issue on.
    """
    for span in spans:
        if span.work not in ("backward", "weights"):
            continue
        inside = [i for i, call in enumerate(calls) if span.began <= call.issued <= span.ended]
        loose = [i for i in inside if not calls[i].blocked_s and calls[i].op == "all_reduce"]
        if not loose:
            continue
        last = max(inside, key=lambda i: calls[i].issued)
        end = max(calls[i].ended for i in loose)
        if last in loose and calls[last].issued < end and 0 <= span.ended - end <= ENDS_AT_ONCE_S:
            yield last, calls[last].ended - calls[last].issued


class Stood:
    """When a training thread stood still for collectives."""

    def __init__(self, one: RankStep) -> None:
        self._spans = sorted((call.ended - call.blocked_s, call.ended) for call in one.calls if call.blocked_s > 0)

    def rest(self, began: float, ended: float) -> float:
        """Seconds between two times in which it did not."""
        first = bisect_left(self._spans, (began, began))
        still = 0.0
        for start, end in self._spans[max(0, first - 1) :]:
            if start >= ended:
                break
            still += max(0.0, min(end, ended) - max(start, began))
        return max(0.0, ended - began - still)


def own_seconds(one: RankStep) -> dict[str, float]:
    """By what the training thread did, the seconds in which it did not stand still for a collective; `OTHER`: those of
    the step that are of no span."""
    still, found = Stood(one), dict[str, float]()
    end, inside = one.began + one.step_s, 0.0
    for span in one.spans:
        own = still.rest(span.began, span.ended)
        found[span.work] = found.get(span.work, 0.0) + own
        inside += own if span.ended <= end + ENDS_AT_ONCE_S else 0.0
    found[OTHER] = max(0.0, still.rest(one.began, end) - inside)
    return found
