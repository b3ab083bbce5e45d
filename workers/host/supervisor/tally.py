"""What the ranks said, summed up for the exit report, in bounded bytes."""

from __future__ import annotations

import json
import re
from collections import deque
from statistics import median
from typing import Any

from contracts.control import LossPoint, StepTiming, Summary
from contracts.fields import CHECKPOINT_NAME_PATTERN, MAX_ABS_NUMBER
from contracts.telemetry.batches import Item
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from contracts.telemetry.steps import Cell, CheckpointItem, EvalItem, StepItem, TrafficItem
from contracts.telemetry.vocabulary import SCRIPT_SETUP_STEPS, SPEED_STEPS, TIMED_STEPS, WARMUP_STEPS

MAX_POINTS = 500
MAX_CHECKPOINTS = 100
MAX_CELLS = 20_000  # of all ranks: a script names its own groups
SUMMARY_BYTES = 3 * 2**19  # as JSON; with the log's tail an exit report stays below contracts.codec.EXIT_BYTES

ROOM_TO_TELL = 64  # bytes, for how many ranks were left out

CellKey = tuple[str, str, str, int]


def cell_key(cell: Cell) -> CellKey:
    """What a cell counts; a newer one of the same key replaces it."""
    return cell["phase"], cell["op"], cell["axis"], cell["group_size"]


class Curve:
    """Points thinned to MAX_POINTS at most: when there are more, every second goes, and of those to come too. The last
    one stays."""

    def __init__(self) -> None:
        self._kept: list[LossPoint] = []
        self._last: LossPoint | None = None
        self._seen, self._stride = 0, 1

    @property
    def points(self) -> list[LossPoint]:
        if self._last is None or self._kept[-1:] == [self._last]:
            return self._kept
        return [*self._kept, self._last]

    def add(self, step: int, loss: float, time: float) -> None:
        self._seen += 1
        self._last = LossPoint(step=step, loss=loss, time=time)
        if self._seen % self._stride == 0:
            self._kept.append(self._last)
        if len(self._kept) == MAX_POINTS:  # there is room for the last
            self._kept = self._kept[1::2]
            self._stride *= 2


class Tally:
    """The state of an attempt as its ranks tell it."""

    def __init__(self, first_rank: int = 0) -> None:
        """`first_rank` of this host tells how far the run is: rank 0 itself, where it is here."""
        self._first_rank = first_rank
        self._cells: dict[int, dict[CellKey, Cell]] = {}
        self._num_cells = 0
        self._overflown: set[int] = set()  # ranks of whose cells some were not kept
        self._losses, self._eval_losses = Curve(), Curve()
        self._verdict: dict[int, list[VerdictRow]] = {}
        self._checkpoints: deque[CheckpointItem] = deque(maxlen=MAX_CHECKPOINTS)
        self._dry_runs: dict[int, DryRunItem] = {}
        self._peaks: dict[str, int] = {}
        self._memory: dict[str, MemoryParts] = {}
        self._proof: ProofItem | None = None
        self._profile: dict[str, Any] | None = None
        self._lab: dict[str, Any] | None = None
        self._speeds: deque[tuple[int, float]] = deque(maxlen=SPEED_STEPS)  # tokens, seconds
        self._step_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self.steps = self._ran = 0
        self.training = False

    def stopped_early(self, steps: int) -> bool:
        """Whether a run of so many left some undone: one that had none left tells a verdict and no step."""
        return self.steps < steps and not self._verdict

    @property
    def tried(self) -> int:
        """Ranks of a dry run."""
        return len(self._dry_runs)

    @property
    def checkpoint(self) -> str | None:
        """The newest that is complete, by its name."""
        names = (item["name"] or "" for item in reversed(self._checkpoints))
        return next((name for name in names if re.fullmatch(CHECKPOINT_NAME_PATTERN, name)), None)

    def add(self, item: Item) -> None:
        """Take one checked item from a rank."""
        if item["kind"] == "traffic":
            self._add_traffic(item)
        elif item["kind"] == "step":
            self._add_step(item)
        elif item["kind"] == "eval":
            self._add_eval(item)
        elif item["kind"] == "phase":
            self.training = self.training or item["phase"] == "step"
            if item["rank"] == self._first_rank and "steps" in item:
                self.steps = item["steps"]
                self._ran = max(0, self.steps - SCRIPT_SETUP_STEPS)  # its phase "step" begins behind them
        elif item["kind"] == "profile":
            self._profile = item["profile"]
        elif item["kind"] == "lab":
            self._lab = item["result"]
        elif item["kind"] == "checkpoint":
            self._checkpoints.append(item)
        elif item["kind"] == "dry_run":
            self._dry_runs[item["rank"]] = item
        elif item["kind"] == "proof":
            self._proof = item
        elif item["kind"] == "verdict":
            self._verdict[item["rank"]] = item["rows"]
            if "peak_bytes" in item:
                self._peaks[str(item["rank"])] = item["peak_bytes"]
            if "memory" in item:
                self._memory[str(item["rank"])] = item["memory"]

    def _add_traffic(self, item: TrafficItem) -> None:
        cells = self._cells.setdefault(item["rank"], {})
        for cell in item["cells"]:
            key = cell_key(cell)
            if key not in cells:
                if self._num_cells >= MAX_CELLS:
                    self._overflown.add(item["rank"])
                    continue
                self._num_cells += 1
            cells[key] = cell

    def _add_step(self, item: StepItem) -> None:
        if item["rank"] != self._first_rank:
            return
        if item["ran"] > WARMUP_STEPS:
            self._step_s.append(item["step_s"])
        self.steps, self._ran = item["step"], item["ran"]
        self._speeds.append((item["tokens"], item["step_s"]))
        if item["loss"] is not None:
            self._losses.add(item["step"], item["loss"], item["time"])

    def _add_eval(self, item: EvalItem) -> None:
        self._eval_losses.add(item["step"], item["loss"], item["time"])

    def _speed(self) -> float | None:
        """Tokens a second of the last steps together; a mean of their speeds would weigh the quick ones more."""
        tokens, seconds = sum(tokens for tokens, _ in self._speeds), sum(took for _, took in self._speeds)
        return tokens / seconds if seconds > tokens / MAX_ABS_NUMBER else None

    def summary(self) -> Summary:
        """What stays with the job when the stream is gone. What does not fit into SUMMARY_BYTES is left out, the
        ranks' cells first, from the last rank on; of how many ranks, it says."""
        summary = Summary(
            steps=self.steps,
            tokens_per_s=self._speed(),
            losses=self._losses.points,
            eval_losses=self._eval_losses.points,
            cells={},
            verdict={},
        )
        if self._step_s:
            summary["measured"] = StepTiming(steps=len(self._step_s), step_s=median(self._step_s))
        if self._ran != self.steps:
            summary["ran_steps"] = self._ran
        if self._checkpoints:
            summary["checkpoints"] = list(self._checkpoints)
        if self._proof is not None:
            summary["proof"] = self._proof
        room = SUMMARY_BYTES - _size(summary) - ROOM_TO_TELL
        if self._peaks and (room := room - _size(self._peaks)) >= 0:
            summary["peak_bytes"] = self._peaks
        if self._memory and (room := room - _size(self._memory)) >= 0:
            summary["memory"] = self._memory
        if self._profile is not None and (room := room - _size(self._profile)) >= 0:
            summary["profile"] = self._profile
        if self._lab is not None and (room := room - _size(self._lab)) >= 0:
            summary["lab"] = self._lab
        dry_runs = list(self._dry_runs.values())
        if dry_runs and (room := room - _size(dry_runs)) >= 0:
            summary["dry_runs"] = dry_runs
        for rank, rows in sorted(self._verdict.items()):
            if (room := room - _size(rows)) >= 0:
                summary["verdict"][str(rank)] = rows
        for rank, cells in sorted(self._cells.items()):
            if (room := room - _size(list(cells.values()))) >= 0:
                summary["cells"][str(rank)] = list(cells.values())
        whole = {int(rank) for rank in summary["cells"]} - self._overflown
        if left_out := len(self._cells) - len(whole):
            summary["cells_left_out"] = left_out
        return summary


def _size(value: object) -> int:
    return len(json.dumps(value))
