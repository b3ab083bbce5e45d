"""Cumulative counters of ranks, and what each of them rose by in which second.

Counters are cumulative, so each value becomes the rise since the one before: rows of a counter add up to its last
value whatever was lost between. What rose over a gap is told in the second in which the gap began.
"""

from __future__ import annotations

import math
from typing import Any

from contracts.telemetry.steps import Cell
from jobs.runs.history.store.state import RankState
from jobs.runs.history.store.tables import TABLES

MOST_CELLS = 100_000  # counters of an attempt: a script names its own groups
SETTLED_S = 2.0  # after a gap, in which a counter that was not known before may have begun in it


def cell_key(cell: Cell) -> str:
    return f"{cell['phase']}/{cell['axis']}/{cell['op']}/{cell['group_size']}"


class Counters:
    """Rises since the last `take`; the counters themselves are each rank's `cells`."""

    def __init__(self, ranks: dict[int, RankState]) -> None:
        self._num_cells = sum(len(rank["cells"]) for rank in ranks.values())
        self._rises: dict[tuple[int, int, str, str, str, int], list[float]] = {}

    @property
    def waiting(self) -> bool:
        """Whether there is a row to take."""
        return bool(self._rises)

    def take(self) -> dict[str, list[Any]]:
        """Columns of the table "traffic"; there is at least one row."""
        rises, self._rises = self._rises, {}
        rows = [(*key, *amounts) for key, amounts in sorted(rises.items())]
        return dict(zip(TABLES["traffic"].names, map(list, zip(*rows, strict=True)), strict=True))

    def add(self, number: int, rank: RankState, time: float, cells: list[Cell]) -> int:
        """Take a rank's counters as they were at a time; returns how many are refused, being one too many."""
        refused, known = 0, rank["cells"]
        for cell in cells:
            key = cell_key(cell)
            before = known.get(key)
            if before is None:
                if self._num_cells >= MOST_CELLS:
                    refused += 1
                    continue
                self._num_cells += 1
            # Step items and traffic items leave the rank by two doors: an older snapshot may arrive second.
            elif cell["count"] < before["count"] or cell["completed"] < before["completed"]:
                continue
            known[key] = cell
            self._rise(math.floor(_when(rank, key, before, time)), number, cell, before)
        return refused

    def _rise(self, second: int, number: int, cell: Cell, before: Cell | None) -> None:
        calls, completed = cell["count"], cell["completed"]
        payload, algorithmic, busy = cell["payload_bytes"], cell["algorithmic_bytes"], cell["busy_s"]
        if before is not None:
            calls -= before["count"]
            completed -= before["completed"]
            payload -= before["payload_bytes"]
            algorithmic -= before["algorithmic_bytes"]
            busy -= before["busy_s"]
        if not (calls or completed or payload or algorithmic or busy):
            return
        place = (second, number, cell["phase"], cell["op"], cell["axis"], cell["group_size"])
        sums = self._rises.get(place)
        if sums is None:
            self._rises[place] = [calls, completed, payload, algorithmic, busy]
            return
        sums[0] += calls
        sums[1] += completed
        sums[2] += payload
        sums[3] += algorithmic
        sums[4] += busy


def _when(rank: RankState, key: str, before: Cell | None, time: float) -> float:
    """When a counter rose: over a gap, as that began."""
    if rank["gap"] is None:
        return time
    since, until = rank["gap"]
    if before is None:
        return since if time < until + SETTLED_S else time
    if key in rank["stale"]:
        rank["stale"].remove(key)
        return since
    return time
