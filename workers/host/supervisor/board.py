"""What the ranks said: waiting to be sent, and summed up for the exit report."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from contracts.control import LossPoint, Summary
from contracts.telemetry import (
    VERSION,
    Batch,
    Cell,
    CheckpointItem,
    DryRunItem,
    EvalItem,
    GapItem,
    Item,
    StepItem,
    TrafficItem,
    VerdictRow,
)

MAX_WAITING = 20_000
MAX_LOG_CHARS = 32 * 2**20  # of all log items that wait
MAX_POINTS = 500
MAX_CHECKPOINTS = 100
SPEED_STEPS = 20

CellKey = tuple[str, str, str, int]


class Board:
    """Collects items of all ranks between two batches.

    Cells are cumulative, so a newer one replaces an older one: while Redis is away traffic is thinned and nothing is
    lost. Other items wait, up to MAX_WAITING and MAX_LOG_CHARS; the oldest are dropped and counted as
    a gap.
    """

    def __init__(self, job: str, attempt: int) -> None:
        self._job, self._attempt = job, attempt
        self._waiting: deque[Item] = deque()
        self._log_chars = 0
        self._lost = 0
        self._traffic: dict[int, dict[CellKey, Cell]] = {}
        self._dropped: dict[int, int] = {}
        self._cells: dict[int, dict[CellKey, Cell]] = {}
        self._losses: list[LossPoint] = []
        self._stride = 1
        self._eval_losses: list[LossPoint] = []
        self._verdict: dict[str, list[VerdictRow]] = {}
        self._checkpoints: deque[CheckpointItem] = deque(maxlen=MAX_CHECKPOINTS)
        self.dry_runs: list[DryRunItem] = []
        self.profile: dict[str, Any] | None = None
        self.lab: dict[str, Any] | None = None
        self._speeds: deque[float] = deque(maxlen=SPEED_STEPS)
        self.steps = self._ran = 0
        self.training = False

    def add(self, item: Item) -> None:
        """Take one item from a rank, or a log item."""
        if item["kind"] == "traffic":
            self._add_traffic(item)
            return
        if item["kind"] == "step":
            self._add_step(item)
        elif item["kind"] == "eval":
            self._eval_losses.append(_point(item))
        elif item["kind"] == "phase":
            self.training = self.training or item["phase"] == "step"
        elif item["kind"] == "profile":
            self.profile = item["profile"]
            return  # for the exit report, not for the page
        elif item["kind"] == "lab":
            self.lab = item["result"]
            return
        elif item["kind"] == "checkpoint":
            self._checkpoints.append(item)
        elif item["kind"] == "dry_run":
            self.dry_runs.append(item)
        elif item["kind"] == "verdict":
            self._verdict[str(item["rank"])] = item["rows"]
        self._waiting.append(item)
        self._log_chars += _log_chars(item)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._waiting) > MAX_WAITING or self._log_chars > MAX_LOG_CHARS:
            self._log_chars -= _log_chars(self._waiting.popleft())
            self._lost += 1

    def _add_traffic(self, item: TrafficItem) -> None:
        for cell in item["cells"]:
            key = (cell["phase"], cell["op"], cell["axis"], cell["group_size"])
            self._traffic.setdefault(item["rank"], {})[key] = cell
            self._cells.setdefault(item["rank"], {})[key] = cell
        self._dropped[item["rank"]] = item["dropped"]

    def _add_step(self, item: StepItem) -> None:
        if item["rank"] != 0:
            return
        self.steps, self._ran = item["step"], item["ran"]
        self._speeds.append(item["tokens"] / item["step_s"])
        if item["loss"] is not None and item["step"] % self._stride == 0:
            self._losses.append(LossPoint(step=item["step"], loss=item["loss"], time=item["time"]))
        if len(self._losses) > MAX_POINTS:
            self._losses = self._losses[1::2]
            self._stride *= 2

    def take(self) -> Batch | None:
        """Everything waiting as one batch, None when nothing is. Hand it back with `give_back` if it was not sent."""
        now = time.time()
        items: list[Item] = []
        if self._lost:
            items.append(GapItem(kind="gap", time=now, items=self._lost))
        items += self._waiting
        for rank, cells in sorted(self._traffic.items()):
            dropped = self._dropped.get(rank, 0)
            items.append(TrafficItem(kind="traffic", rank=rank, time=now, cells=list(cells.values()), dropped=dropped))
        self._waiting.clear()
        self._log_chars = 0
        self._traffic.clear()
        self._lost = 0
        if not items:
            return None
        return Batch(v=VERSION, job=self._job, attempt=self._attempt, time=now, items=items)

    def give_back(self, batch: Batch) -> None:
        """The batch could not be sent: its items wait again, before those that came since."""
        newer = list(self._waiting)
        self._waiting.clear()
        for item in batch["items"]:
            if item["kind"] == "gap":
                self._lost += item["items"]
            elif item["kind"] == "traffic":
                for cell in item["cells"]:
                    key = (cell["phase"], cell["op"], cell["axis"], cell["group_size"])
                    self._traffic.setdefault(item["rank"], {}).setdefault(key, cell)
            else:
                self._waiting.append(item)
                self._log_chars += _log_chars(item)
        self._waiting.extend(newer)
        self._drop_oldest()

    def summary(self) -> Summary:
        """What stays with the job when the stream is gone."""
        speed = sum(self._speeds) / len(self._speeds) if self._speeds else None
        summary = Summary(
            steps=self.steps,
            tokens_per_s=speed,
            losses=self._losses,
            eval_losses=self._eval_losses,
            cells={str(rank): list(cells.values()) for rank, cells in sorted(self._cells.items())},
            verdict=self._verdict,
        )
        if self._ran != self.steps:
            summary["ran_steps"] = self._ran
        if self._checkpoints:
            summary["checkpoints"] = list(self._checkpoints)
        if self.dry_runs:
            summary["dry_runs"] = self.dry_runs
        if self.profile is not None:
            summary["profile"] = self.profile
        if self.lab is not None:
            summary["lab"] = self.lab
        return summary


def _point(item: EvalItem) -> LossPoint:
    return LossPoint(step=item["step"], loss=item["loss"], time=item["time"])


def _log_chars(item: Item) -> int:
    return sum(map(len, item["lines"])) if item["kind"] == "log" else 0
