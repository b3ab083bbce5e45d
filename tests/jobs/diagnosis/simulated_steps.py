"""Simulate steps of ranks, and return the timeline items that the ranks would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contracts.telemetry.batches import Item
from tests.jobs.diagnosis.items import ITEM, NOW


class Does(NamedTuple):
    """Work for some seconds."""

    work: str
    seconds: float
    micro_batch: int = -1


class Meets(NamedTuple):
    """Join a collective that takes `transfer_s` once all ranks arrived. Each rank is blocked until it ends."""

    axis: str
    ranks: tuple[int, ...]
    op: str = "all_reduce"
    num_bytes: int = 1 << 20
    transfer_s: float = 0.001


class Passes(NamedTuple):
    """Send a message. The sender continues at once, and the receiver is blocked until the message arrives."""

    sender: int
    receiver: int
    ranks: tuple[int, ...]
    transfer_s: float = 0.0005


Act = Does | Meets | Passes


class Player:
    """Simulate consecutive steps. `offsets`: seconds by rank that its host's clock is ahead of the board's."""

    def __init__(self, world: int, offsets: Mapping[int, float] | None = None) -> None:
        self._world, self._offsets = world, offsets or {}
        self._sequences: dict[tuple[object, ...], int] = {}
        self.now = 0.0
        self.step = 3  # after the warm-up

    def play(self, acts: Mapping[int, Sequence[Act]]) -> list[Item]:
        """Simulate one step. `acts`: the actions of each rank, in order. All ranks end together."""
        self.step += 1
        clock = dict.fromkeys(range(self._world), self.now)
        indexes = dict.fromkeys(range(self._world), 0)
        calls: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(self._world)}
        spans: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(self._world)}
        sent: dict[tuple[int, int], list[float]] = {}
        while any(indexes[rank] < len(acts[rank]) for rank in range(self._world)):
            has_progress = False
            for rank in range(self._world):
                while indexes[rank] < len(acts[rank]):
                    act = acts[rank][indexes[rank]]
                    if isinstance(act, Does):
                        spans[rank].append((act.work, act.micro_batch, clock[rank], clock[rank] + act.seconds))
                        clock[rank] += act.seconds
                    elif isinstance(act, Passes):
                        route = (act.sender, act.receiver)
                        if rank == act.receiver and not sent.get(route):
                            break
                        self._pass(act, rank, clock, calls, sent)
                    else:
                        others = [other for other in act.ranks if other != rank]
                        if any(indexes[o] >= len(acts[o]) or acts[o][indexes[o]] != act for o in others):
                            break
                        self._meet(act, clock, calls)
                        for other in others:
                            indexes[other] += 1
                    indexes[rank] += 1
                    has_progress = True
            assert has_progress, "the ranks deadlock"
        began, self.now = self.now, max(clock.values())
        return [self._item(rank, began, calls[rank], spans[rank]) for rank in range(self._world)]

    def _next(self, *key: object) -> int:
        self._sequences[key] = self._sequences.get(key, 0) + 1
        return self._sequences[key]

    def _meet(self, act: Meets, clock: dict[int, float], calls: dict[int, list[tuple[Any, ...]]]) -> None:
        end = max(clock[rank] for rank in act.ranks) + act.transfer_s
        sequence = self._next(act.axis, act.ranks)
        for rank in act.ranks:
            blocked_s = end - clock[rank]
            calls[rank].append((act.axis, act.ranks, act.op, sequence, clock[rank], blocked_s, end, act.num_bytes, -1))
            clock[rank] = end

    def _pass(
        self,
        act: Passes,
        rank: int,
        clock: dict[int, float],
        calls: dict[int, list[tuple[Any, ...]]],
        sent: dict[tuple[int, int], list[float]],
    ) -> None:
        route = (act.sender, act.receiver)
        if rank == act.sender:
            arrival = clock[rank] + act.transfer_s
            sent.setdefault(route, []).append(arrival)
            number = self._next("send", *route)
            calls[rank].append(("pp", act.ranks, "send", number, clock[rank], 0.0, arrival, 1 << 16, act.receiver))
            return
        end = max(clock[rank], sent[route].pop(0))
        number = self._next("recv", *route)
        calls[rank].append(("pp", act.ranks, "recv", number, clock[rank], end - clock[rank], end, 1 << 16, act.sender))
        clock[rank] = end

    def _item(self, rank: int, began: float, calls: list[tuple[Any, ...]], spans: list[tuple[Any, ...]]) -> Item:
        groups = list(dict.fromkeys((axis, ranks) for axis, ranks, *_ in calls))

        def us(time: float) -> int:
            return round((time - began) * 1e6)

        item = {
            "kind": "timeline",
            "rank": rank,
            "time": NOW + self.now,
            "step": self.step,
            "began": NOW + began + self._offsets.get(rank, 0.0),
            "step_s": self.now - began,
            "groups": [{"axis": axis, "ranks": list(ranks), "nth": 0} for axis, ranks in groups],
            "calls": {
                "group": [groups.index((call[0], call[1])) for call in calls],
                "op": [call[2] for call in calls],
                "sequence": [call[3] for call in calls],
                "issued_us": [us(call[4]) for call in calls],
                "blocked_us": [round(call[5] * 1e6) for call in calls],
                "ended_us": [us(call[6]) for call in calls],
                "payload_bytes": [call[7] for call in calls],
                "peer": [call[8] for call in calls],
            },
            "spans": {
                "work": [span[0] for span in spans],
                "chunk": [-1] * len(spans),
                "micro_batch": [span[1] for span in spans],
                "from_us": [us(span[2]) for span in spans],
                "to_us": [us(span[3]) for span in spans],
            },
            "left_out": 0,
        }
        return ITEM.validate_python(item)
