"""Counters of ranks that torchrun restarts: they continue from the values before the restart.

The first item of a new process says that its imports are done. Its first steps are setup again. Setup steps count only
before the first restart, so a value per step stays the mean of the steps whose traffic it covers.
"""

from __future__ import annotations

from typing import cast

from contracts.telemetry.batches import Item
from contracts.telemetry.steps import Cell
from contracts.telemetry.vocabulary import SCRIPT_SETUP_STEPS
from workers.host.supervisor.exit_report import CellKey, get_cell_key

Cells = dict[CellKey, Cell]
SUMMED_FIELDS = ("count", "completed", "payload_bytes", "algorithmic_bytes", "busy_s")


class CellTotals:
    """Traffic cells of one rank: `before` the last restart, and `total` including the current process."""

    def __init__(self) -> None:
        self.before: Cells = {}
        self.total: Cells = {}

    def add(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells of the current process plus those before the last restart."""
        sums = [_add_cells(cell, self.before.get(get_cell_key(cell))) for cell in cells]
        self.total.update((get_cell_key(cell), cell) for cell in sums)
        return sums

    def restart(self) -> None:
        self.before = dict(self.total)


class RestartCounter:
    """Adjust the items of this node's ranks for restarts."""

    def __init__(self) -> None:
        self._traffic: dict[int, CellTotals] = {}
        self._exact: dict[int, CellTotals] = {}  # at the end of the last step
        self._steps: dict[int, tuple[int, int]] = {}  # before the last restart, and in total

    def adjust(self, item: Item) -> None:
        """Change the counters of a checked item so that they start at the first process of the rank."""
        if item["kind"] == "start" and item["stage"] == "imported":
            self._restart(item["rank"])
        elif item["kind"] == "traffic":
            item["cells"] = self._traffic.setdefault(item["rank"], CellTotals()).add(item["cells"])
        elif item["kind"] == "phase" and "steps" in item:
            before, _ = self._steps.get(item["rank"], (0, 0))
            item["steps"] = before + max(item["steps"], SCRIPT_SETUP_STEPS if before else 0)
            self._steps[item["rank"]] = before, item["steps"]
            if "cells" in item:
                exact = self._exact.setdefault(item["rank"], CellTotals())
                exact.add(item["cells"])
                item["cells"] = list(exact.total.values())

    def _restart(self, rank: int) -> None:
        for totals in (self._traffic, self._exact):
            if rank in totals:
                totals[rank].restart()
        _, steps = self._steps.get(rank, (0, 0))
        self._steps[rank] = (max(0, steps - SCRIPT_SETUP_STEPS),) * 2


def _add_cells(cell: Cell, before: Cell | None) -> Cell:
    if before is None:
        return cell
    sums = {name: cell[name] + before[name] for name in SUMMED_FIELDS}  # type: ignore[literal-required]
    return cast(Cell, cell | sums)
