"""Items to rows, and to what they add up to. Pure: no clock, no database, no files."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from contracts.fields import MAX_ABS_NUMBER
from contracts.telemetry.batches import Batch, GapItem, Item
from contracts.telemetry.health import GaugeItem, ProcessItem, StallItem
from contracts.telemetry.results import DryRunItem, ProofItem, VerdictItem
from contracts.telemetry.steps import (
    Cell,
    CheckpointItem,
    EvalItem,
    LogItem,
    PhaseItem,
    StartItem,
    StepItem,
    TrafficItem,
)
from contracts.telemetry.timeline import TimelineItem
from contracts.telemetry.vocabulary import LIVE_STEPS, MAX_CHECKPOINTS, MAX_UNIX_S, SCRIPT_SETUP_STEPS, SPEED_STEPS
from jobs.runs.history.recording.counters import Counters
from jobs.runs.history.store.state import RankState, Started, State, new_state
from jobs.runs.history.store.tables import GAUGES, TABLES

LARGEST_SHORT = 3.4e38  # of 32 bits
MOST_STARTS = 10_000
MOST_STANDING = 64  # ranks of which it is kept where they stand
MOST_FRAMES = 20  # innermost, of their stacks
Told = dict[str, list[Any]]


class Rows:
    """Rows since the last `take`, and the state after them."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or new_state()
        self._counters = Counters(self.state["ranks"])
        self._tables: dict[str, Told] = {}
        self.first: float | None = None
        self.last: float | None = None
        self._add: dict[str, Callable[[Any], None]] = {
            "traffic": self._add_traffic,
            "step": self._add_step,
            "eval": self._add_eval,
            "phase": self._add_phase,
            "log": self._add_log,
            "verdict": self._add_verdict,
            "proof": self._add_proof,
            "dry_run": self._add_dry_run,
            "checkpoint": self._add_checkpoint,
            "timeline": self._add_timeline,
            "gauge": self._add_gauge,
            "start": self._add_start,
            "standing": self._add_standing,
            "process": self._add_process,
            "gap": self._add_gap,
        }
        self._node, self._host, self._offset_s, self._before = 0, "", 0.0, math.nan

    @property
    def waiting(self) -> bool:
        """Whether there is a row to take."""
        return bool(self._tables) or self._counters.waiting

    def add(self, batch: Batch, node: int, before: float | None) -> None:
        """Take a checked batch of a member whose batch before it was of the time `before`."""
        self._node, self._host = node, batch.get("host", "")
        self._offset_s = batch["clock"]["offset_s"] if "clock" in batch else 0.0
        self._before = batch["time"] if before is None else before
        for item in batch["items"]:
            self.add_item(item)

    def add_item(self, item: Item) -> None:
        """Take one item; what makes no sense is counted."""
        work = self._add.get(item["kind"])
        if work is None:
            return
        if not 0 <= item["time"] < MAX_UNIX_S:
            self.state["refused"] += 1
            return
        try:
            work(item)
        except (IndexError, ValueError):  # columns of different lengths, places that are none
            self.state["refused"] += 1
            return
        self.first = item["time"] if self.first is None else min(self.first, item["time"])
        self.last = item["time"] if self.last is None else max(self.last, item["time"])

    def mark_gap(self, node: int, since: float, until: float, words: str) -> None:
        """A part of a member's stream is missing: its counters' rise over it has no second of its own."""
        self.state["lost"] = True
        for rank in self.state["ranks"].values():
            if rank["node"] == node:
                rank["gap"] = (since, until)
                rank["stale"] = list(rank["cells"])
        self.mark("gap", since, text=words, value=until)

    def mark(
        self, kind: str, time: float, *, rank: int | None = None, step: int | None = None, text: str, value: Any = None
    ) -> None:
        """An annotation over all charts."""
        self._row(
            "marks",
            time=time,
            kind=kind,
            rank=rank,
            step=step,
            text=text,
            value=None if value is None else float(value),
        )

    def take(self) -> dict[str, pa.Table]:
        """All rows since the last time, by table."""
        told, self._tables = self._tables, {}
        if self._counters.waiting:
            told["traffic"] = self._counters.take()
        return {name: pa.table(columns, schema=TABLES[name]) for name, columns in told.items()}

    def _row(self, table: str, **values: Any) -> None:
        columns = self._columns(table)
        for name, column in columns.items():
            column.append(values[name])

    def _columns(self, table: str) -> Told:
        if table not in self._tables:
            self._tables[table] = {name: [] for name in TABLES[table].names}
        return self._tables[table]

    def _rank(self, number: int) -> RankState:
        found = self.state["ranks"].get(number)
        if found is None:
            found = RankState(node=self._node, phase=None, dropped=0, ran=0, exact=[], cells={}, gap=None, stale=[])
            self.state["ranks"][number] = found
        return found

    def _add_cells(self, number: int, time: float, cells: list[Cell]) -> None:
        self.state["refused"] += self._counters.add(number, self._rank(number), time, cells)

    def _add_traffic(self, item: TrafficItem) -> None:
        self._rank(item["rank"])["dropped"] = item["dropped"]
        self.state["processes"].pop(item["rank"], None)  # it speaks for itself again
        self._add_cells(item["rank"], item["time"], item["cells"])

    def _add_step(self, item: StepItem) -> None:
        rank = self._rank(item["rank"])
        if item["ran"] >= rank["ran"]:
            rank["ran"], rank["exact"] = item["ran"], item["cells"]
        self._add_cells(item["rank"], item["time"], item["cells"])
        parts = item.get("parts")
        self._row(
            "steps",
            rank=item["rank"],
            step=item["step"],
            over=1,
            time=item["time"],
            step_s=_short(item["step_s"]),
            tokens=item["tokens"],
            loss=item["loss"],
            grad_norm=item["grad_norm"],
            learning_rate=item["learning_rate"],
            data_s=_short(parts["data"]) if parts else None,
            optimizer_s=_short(parts["optimizer"]) if parts else None,
            exposed=_by_axis(parts["exposed"]) if parts else None,
            hidden=_by_axis(parts["hidden"]) if parts else None,
        )
        if item["rank"] == 0:
            self.state["step_times"] = [*self.state["step_times"], item["step_s"]][-LIVE_STEPS:]
            if not self.state["resumed"] and item["ran"] < item["step"]:
                began = item["step"] - item["ran"]
                self.state["resumed"] = True
                self.mark("resume", item["time"] - item["step_s"], step=began, text=f"resumed from step {began:,}")
        self._go_on(item)
        if "not_finite" in item and item["step"] > self.state["faulty_step"]:
            self.state["faulty_step"] = item["step"]
            self.mark("fault", item["time"], rank=item["rank"], step=item["step"], text=item["not_finite"])

    def _go_on(self, item: StepItem) -> None:
        times = self.state["step_times"][-SPEED_STEPS:] or [item["step_s"]]
        rate = item["tokens"] * len(times) / sum(times) if sum(times) > 0 else math.inf
        before = self.state["progress"]
        if before is not None and item["step"] <= before["step"]:
            before["rate"] = rate if rate <= MAX_ABS_NUMBER else None
            return
        self.state["progress"] = {
            "step": item["step"],
            "steps": item["steps"],
            "step_s": item["step_s"],
            "tokens": item["tokens"],
            "time": item["time"],
            "learning_rate": item["learning_rate"],
            "grad_norm": item["grad_norm"],
            "rate": rate if rate <= MAX_ABS_NUMBER else None,
        }

    def _add_eval(self, item: EvalItem) -> None:
        words = "validation loss"
        self.mark("validation", item["time"], rank=item["rank"], step=item["step"], text=words, value=item["loss"])

    def _add_phase(self, item: PhaseItem) -> None:
        rank = self._rank(item["rank"])
        changed, rank["phase"] = item["phase"] != rank["phase"], item["phase"]
        if "cells" in item:
            # A script's phase "step" begins behind its first steps.
            rank["ran"], rank["exact"] = max(0, item.get("steps", 0) - SCRIPT_SETUP_STEPS), item["cells"]
            self._add_cells(item["rank"], item["time"], item["cells"])
        if item["rank"] != 0:
            return
        if "steps" in item:
            self.state["progress"] = {"step": item["steps"], "steps": None, "rate": None}
        if changed:
            self.mark("phase", item["time"], rank=0, step=item.get("steps"), text=item["phase"])

    def _add_log(self, item: LogItem) -> None:
        self._row(
            "logs",
            time=item["time"],
            node=self._node,
            rank=item["rank"],
            first=item["first"],
            lines=item["lines"],
            skipped=item.get("skipped", 0),
        )

    def _add_verdict(self, item: VerdictItem) -> None:
        self.state["verdicts"][item["rank"]] = item["rows"]
        if "peak_bytes" in item:
            self.state["peaks"][item["rank"]] = item["peak_bytes"]
        if "memory" in item:
            self.state.setdefault("memory", {})[item["rank"]] = item["memory"]

    def _add_proof(self, item: ProofItem) -> None:
        self.state["proof"] = item

    def _add_dry_run(self, item: DryRunItem) -> None:
        self.state["dry_runs"][item["rank"]] = item

    def _add_checkpoint(self, item: CheckpointItem) -> None:
        others = [told for told in self.state["checkpoints"] if told["step"] != item["step"]]
        self.state["checkpoints"] = [*others, item][-MAX_CHECKPOINTS:]
        text = item["name"] or item["problem"]
        self.mark(
            "checkpoint" if item["name"] else "fault",
            item["time"],
            rank=item["rank"],
            step=item["step"],
            text=text,
            value=item["num_bytes"],
        )

    def _add_timeline(self, item: TimelineItem) -> None:
        began = item["began"] + self._offset_s
        if not 0 <= began < MAX_UNIX_S:
            raise ValueError("no time")
        _same_length(item["calls"])
        _same_length(item["spans"])
        self._add_calls(item, began)
        spans = item["spans"]
        added: Told = {
            "step": [item["step"]] * len(spans["work"]),
            "rank": [item["rank"]] * len(spans["work"]),
            "work": list(spans["work"]),
            "chunk": spans["chunk"],
            "micro_batch": spans["micro_batch"],
            "began": [began + us / 1e6 for us in spans["from_us"]],
            "ended": [began + us / 1e6 for us in spans["to_us"]],
        }
        self._extend("spans", added)

    def _add_calls(self, item: TimelineItem, began: float) -> None:
        calls, groups = item["calls"], [item["groups"][place] for place in item["calls"]["group"]]
        added: Told = {
            "step": [item["step"]] * len(groups),
            "rank": [item["rank"]] * len(groups),
            "axis": [group["axis"] for group in groups],
            "ranks": [group["ranks"] for group in groups],
            "nth": [group["nth"] for group in groups],
            "sequence": calls["sequence"],
            "op": list(calls["op"]),
            "issued": [began + us / 1e6 for us in calls["issued_us"]],
            "blocked_s": [us / 1e6 for us in calls["blocked_us"]],
            "ended": [began + us / 1e6 for us in calls["ended_us"]],
            "payload_bytes": calls["payload_bytes"],
            "peer": calls["peer"],
        }
        self._extend("calls", added)

    def _extend(self, table: str, added: Told) -> None:
        if not added["step"]:
            return
        for name, column in self._columns(table).items():
            column.extend(added[name])

    def _add_gauge(self, item: GaugeItem) -> None:
        told: dict[str, Any] = dict(item)
        values = {name: told.get(name) for name in GAUGES.names}
        self._row("gauges", **{**values, "node": self._node, "host": self._host})

    def _add_start(self, item: StartItem) -> None:
        if len(self.state["starts"]) >= MOST_STARTS:
            return
        told = Started(node=self._node, rank=item["rank"], stage=item["stage"], time=item["time"])
        self.state["starts"].append(told)
        self.mark("start", item["time"], rank=item["rank"], text=item["stage"])

    def _add_standing(self, item: StallItem) -> None:
        known = self.state["standing"]
        known.pop(item["rank"], None)
        if item["still"] > 0 and len(known) < MOST_STANDING:
            known[item["rank"]] = {**item, "stack": item["stack"][-MOST_FRAMES:]}

    def _add_process(self, item: ProcessItem) -> None:
        known = self.state["processes"]
        known.pop(item["rank"], None)
        if len(known) < MOST_STANDING:
            known[item["rank"]] = {**item, "stack": item["stack"][-MOST_FRAMES:]}

    def _add_gap(self, item: GapItem) -> None:
        words = f"{item['items']:,} telemetry items were lost while the host had no connection to the board"
        self.mark_gap(self._node, min(self._before, item["time"]), item["time"], words)


def _same_length(columns: Any) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("columns differ in length")


def _short(seconds: float) -> float:
    return min(seconds, LARGEST_SHORT)


def _by_axis(told: dict[str, float]) -> list[tuple[str, float]]:
    return [(axis, _short(seconds)) for axis, seconds in told.items()]
