"""Ranks that torchrun started again: what they count goes on from where the try before ended.

A new process of a rank tells first that it has imported what it needs. Its own first steps are set-up once more: as
steps they count in the first try alone, and a figure of a step stays the mean of those whose traffic it covers.
"""

from __future__ import annotations

from typing import cast

from contracts.telemetry.batches import Item
from contracts.telemetry.steps import Cell
from contracts.telemetry.vocabulary import SCRIPT_SETUP_STEPS
from workers.host.supervisor.tally import CellKey, cell_key

Cells = dict[CellKey, Cell]
SUMMED = ("count", "completed", "payload_bytes", "algorithmic_bytes", "busy_s")


class Counted:
    """By one rank: `before`, in the tries that are over, and `last`, with the one that runs."""

    def __init__(self) -> None:
        self.before: Cells = {}
        self.last: Cells = {}

    def add(self, cells: list[Cell]) -> list[Cell]:
        """These of the try that runs, with those before."""
        summed = [_sum(cell, self.before.get(cell_key(cell))) for cell in cells]
        self.last.update((cell_key(cell), cell) for cell in summed)
        return summed

    def begin(self) -> None:
        self.before = dict(self.last)


class Tries:
    """Of the ranks of this node."""

    def __init__(self) -> None:
        self._traffic: dict[int, Counted] = {}
        self._exact: dict[int, Counted] = {}  # as the last step ended
        self._steps: dict[int, tuple[int, int]] = {}  # in the tries that are over, and with the one that runs

    def carry(self, item: Item) -> None:
        """Let a rank's checked item count from the first try on."""
        if item["kind"] == "start" and item["stage"] == "imported":
            self._begin(item["rank"])
        elif item["kind"] == "traffic":
            item["cells"] = self._traffic.setdefault(item["rank"], Counted()).add(item["cells"])
        elif item["kind"] == "phase" and "steps" in item:
            before, _ = self._steps.get(item["rank"], (0, 0))
            item["steps"] = before + max(item["steps"], SCRIPT_SETUP_STEPS if before else 0)
            self._steps[item["rank"]] = before, item["steps"]
            if "cells" in item:
                exact = self._exact.setdefault(item["rank"], Counted())
                exact.add(item["cells"])
                item["cells"] = list(exact.last.values())

    def _begin(self, rank: int) -> None:
        for counted in (self._traffic, self._exact):
            if rank in counted:
                counted[rank].begin()
        _, steps = self._steps.get(rank, (0, 0))
        self._steps[rank] = (max(0, steps - SCRIPT_SETUP_STEPS),) * 2


def _sum(cell: Cell, before: Cell | None) -> Cell:
    if before is None:
        return cell
    numbers = {name: cell[name] + before[name] for name in SUMMED}  # type: ignore[literal-required]
    return cast(Cell, cell | numbers)
