"""Convert telemetry items to rows of a history and to its state. Pure: no clock, no database, no files."""

from __future__ import annotations

import math
from typing import Any, Literal

import pyarrow as pa

from contracts.fields import MAX_ABS_NUMBER
from contracts.telemetry.batches import Batch, Item
from contracts.telemetry.items import (
    LIVE_STEPS,
    MAX_CHECKPOINTS,
    MAX_UNIX_S,
    SCRIPT_SETUP_STEPS,
    SPEED_STEPS,
    Cell,
    CheckpointItem,
    LogItem,
    PhaseItem,
    ProcessItem,
    StallItem,
    StartItem,
    StepItem,
    TimelineItem,
    list_step_times,
)
from contracts.telemetry.metrics import MAX_ATTEMPT_METRIC_NAMES, MetricItem, is_loss
from contracts.telemetry.results import VerdictItem
from jobs.runs.history.store.schema import GAUGES, TABLES, HistoryState, OpenLog, RankTotals, StartedStage, make_state
from jobs.runs.traces.traced_steps import convert_timeline

MAX_CELLS = 100_000  # per attempt, because a script names its own process groups
GAP_SETTLE_S = 2.0  # after a gap, a new counter counts as started in the gap


_CELL_COUNTERS: tuple[Literal["count", "completed", "payload_bytes", "algorithmic_bytes", "busy_s"], ...] = (
    *("count", "completed", "payload_bytes", "algorithmic_bytes", "busy_s"),
)  # in the order of the table "traffic"


class CounterIncreases:
    """Convert cumulative counters of ranks to increases per second.

    The increases of a counter add up to its last value, even if items were lost. An increase over a gap counts in the
    second in which the gap began.
    """

    def __init__(self, ranks: dict[int, RankTotals]) -> None:
        self._num_cells = sum(len(rank["cells"]) for rank in ranks.values())
        self._increases: dict[tuple[int, int, str, str, str, int], list[float]] = {}

    @property
    def is_pending(self) -> bool:
        """Return True if increases are pending."""
        return bool(self._increases)

    def take(self) -> dict[str, list[Any]]:
        """Return and clear the pending increases as columns of the table "traffic"."""
        increases, self._increases = self._increases, {}
        rows = [(*key, *amounts) for key, amounts in sorted(increases.items())]
        return dict(zip(TABLES["traffic"].names, map(list, zip(*rows, strict=True)), strict=True))

    def add(self, number: int, rank: RankTotals, time: float, cells: list[Cell]) -> int:
        """Add the counters of a rank at a time. Return the number of rejected counters above the limit."""
        num_rejected, known = 0, rank["cells"]
        for cell in cells:
            key = f"{cell['phase']}/{cell['axis']}/{cell['op']}/{cell['group_size']}"
            before = known.get(key)
            if before is None:
                if self._num_cells >= MAX_CELLS:
                    num_rejected += 1
                    continue
                self._num_cells += 1
            # Step items and traffic items leave a rank on two paths, so an older value may arrive second.
            elif cell["count"] < before["count"] or cell["completed"] < before["completed"]:
                continue
            known[key] = cell
            self._add_increase(math.floor(_get_increase_time(rank, key, before, time)), number, cell, before)
        return num_rejected

    def _add_increase(self, second: int, number: int, cell: Cell, before: Cell | None) -> None:
        increases = [cell[name] - (before[name] if before is not None else 0) for name in _CELL_COUNTERS]
        if not any(increases):
            return
        key = (second, number, cell["phase"], cell["op"], cell["axis"], cell["group_size"])
        sums = self._increases.get(key)
        self._increases[key] = increases if sums is None else [a + b for a, b in zip(sums, increases, strict=True)]


def _get_increase_time(rank: RankTotals, key: str, before: Cell | None, time: float) -> float:
    """Return the time of an increase, which is the begin of a gap if the counter has no value after it."""
    if rank["gap"] is None:
        return time
    gap_start, gap_end = rank["gap"]
    if before is None:
        return gap_start if time < gap_end + GAP_SETTLE_S else time
    if key in rank["stale"]:
        rank["stale"].remove(key)
        return gap_start
    return time


MAX_FLOAT32 = 3.4e38
MAX_STARTS = 10_000
MAX_STALLED_RANKS = 64  # with stored stacks
MAX_FRAMES = 20  # innermost frames of a stack
Columns = dict[str, list[Any]]


class RowBuilder:
    """Build rows of new items, and update the state."""

    def __init__(self, state: HistoryState | None = None) -> None:
        self.state = state or make_state()
        self._counters = CounterIncreases(self.state["ranks"])
        self._tables: dict[str, Columns] = {}
        self.first: float | None = None
        self.last: float | None = None
        self._node, self._host, self._offset_s, self._before = 0, "", 0.0, math.nan

    def add(self, batch: Batch, node: int, before: float | None) -> None:
        """Add a valid batch of a node. `before`: the time of the node's previous batch."""
        self._node, self._host = node, batch.get("host", "")
        self._offset_s = batch["clock"]["offset_s"] if "clock" in batch else 0.0
        self._before = batch["time"] if before is None else before
        for item in batch["items"]:
            self.add_item(item)

    def add_item(self, item: Item) -> None:
        """Add an item. Invalid items are counted."""
        try:
            self._add_by_kind(item)
        except (IndexError, ValueError):  # columns of different lengths, invalid indexes or times
            self.state["refused"] += 1
            return
        self.first = item["time"] if self.first is None else min(self.first, item["time"])
        self.last = item["time"] if self.last is None else max(self.last, item["time"])

    def _add_by_kind(self, item: Item) -> None:
        if not 0 <= item["time"] < MAX_UNIX_S:
            raise ValueError("the time is invalid")
        match item["kind"]:
            case "traffic":
                self._get_rank_state(item["rank"])["dropped"] = item["dropped"]
                self.state["processes"].pop(item["rank"], None)  # the rank sends again
                self._add_cells(item["rank"], item["time"], item["cells"])
            case "step":
                self._add_step(item)
            case "eval":
                place = {"rank": item["rank"], "step": item["step"]}
                self.mark("validation", item["time"], **place, text="validation loss", value=item["loss"])
            case "metric":
                self._add_metrics(item)
            case "phase":
                self._add_phase(item)
            case "log":
                self._add_log(item)
            case "verdict":
                self._add_verdict(item)
            case "proof":
                self.state["proof"] = item
            case "dry_run":
                self.state["dry_runs"][item["rank"]] = item
            case "checkpoint":
                self._add_checkpoint(item)
            case "timeline":
                self._add_timeline(item)
            case "gauge":
                if "peak_bytes" in item:  # the item has no other value
                    self.state["peaks"][item["rank"]] = item["peak_bytes"]
                else:
                    gauges: dict[str, Any] = dict(item)
                    values = {name: gauges.get(name) for name in GAUGES.names}
                    self._add_row("gauges", **{**values, "node": self._node, "host": self._host})
            case "start":
                self._add_start(item)
            case "standing":
                self.state["standing"].pop(item["rank"], None)
                if item["still"] > 0:
                    _store_stack(self.state["standing"], item)
            case "process":
                self.state["processes"].pop(item["rank"], None)
                _store_stack(self.state["processes"], item)
            case "gap":
                words = f"{item['items']:,} telemetry items were lost while the host had no connection to the board"
                self.mark_gap(self._node, min(self._before, item["time"]), item["time"], words)

    def mark_gap(self, node: int, since: float, until: float, words: str) -> None:
        """Record a gap in a node's stream. Increases of counters over the gap have no exact second."""
        self.state["lost"] = True
        for rank in self.state["ranks"].values():
            if rank["node"] == node:
                rank["gap"] = (since, until)
                rank["stale"] = list(rank["cells"])
        self.mark("gap", since, text=words, value=until)

    def mark(
        self, kind: str, time: float, *, rank: int | None = None, step: int | None = None, text: str, value: Any = None
    ) -> None:
        """Add a mark, which charts show as an annotation."""
        value = None if value is None else float(value)
        self._add_row("marks", time=time, kind=kind, rank=rank, step=step, text=text, value=value)

    def take(self) -> dict[str, pa.Table]:
        """Return and clear the pending rows by table."""
        columns_by_table, self._tables = self._tables, {}
        if self._counters.is_pending:
            columns_by_table["traffic"] = self._counters.take()
        return {name: pa.table(columns, schema=TABLES[name]) for name, columns in columns_by_table.items()}

    def _add_row(self, table: str, **values: Any) -> None:
        columns = self._columns(table)
        for name, column in columns.items():
            column.append(values[name])

    def _columns(self, table: str) -> Columns:
        if table not in self._tables:
            self._tables[table] = {name: [] for name in TABLES[table].names}
        return self._tables[table]

    def _get_rank_state(self, number: int) -> RankTotals:
        state = self.state["ranks"].get(number)
        if state is None:
            state = RankTotals(node=self._node, phase=None, dropped=0, ran=0, exact=[], cells={}, gap=None, stale=[])
            self.state["ranks"][number] = state
        return state

    def _add_cells(self, number: int, time: float, cells: list[Cell]) -> None:
        self.state["refused"] += self._counters.add(number, self._get_rank_state(number), time, cells)

    def _add_step(self, item: StepItem) -> None:
        rank = self._get_rank_state(item["rank"])
        if item["ran"] >= rank["ran"]:
            rank["ran"], rank["exact"] = item.get("counted", item["ran"]), item["cells"]
        self._add_cells(item["rank"], item["time"], item["cells"])
        parts = item.get("parts")
        self._add_row(
            "steps",
            rank=item["rank"],
            step=item["step"],
            over=item.get("over", 1),
            time=item["time"],
            step_s=_to_float32(item["step_s"]),
            tokens=item["tokens"],
            samples=item.get("samples"),
            loss=item["loss"],
            grad_norm=item["grad_norm"],
            learning_rate=item["learning_rate"],
            data_s=_to_float32(parts["data"]) if parts and "data" in parts else None,
            optimizer_s=_to_float32(parts["optimizer"]) if parts and "optimizer" in parts else None,
            exposed=_convert_axes(parts["exposed"]) if parts else None,
            hidden=_convert_axes(parts["hidden"]) if parts else None,
        )
        if item["rank"] == 0:
            times = list_step_times(item)
            self.state["step_times"] = [*self.state["step_times"], *times][-LIVE_STEPS:]
            rates = self.state.get("sample_rates", [])
            self.state["sample_rates"] = [*rates, (item.get("samples"), item["step_s"])][-SPEED_STEPS:]
            if not self.state["resumed"] and item["ran"] < item["step"]:
                began = item["step"] - item["ran"]
                self.state["resumed"] = True
                self.mark("resume", item["time"] - item["step_s"], step=began, text=f"resumed from step {began:,}")
        self._update_progress(item)
        if "not_finite" in item and item["step"] > self.state["faulty_step"]:
            self.state["faulty_step"] = item["step"]
            self.mark("fault", item["time"], rank=item["rank"], step=item["step"], text=item["not_finite"])

    def _add_metrics(self, item: MetricItem) -> None:
        if "left_out" in item:
            self.state.setdefault("metrics_left_out", {})[item["rank"]] = item["left_out"]
        names = self.state.setdefault("metric_names", [])
        place = {name: item[name] for name in ("rank", "step", "time", "source")}
        faults = item.get("not_finite", {})
        for name in [*item["values"], *faults]:
            if name not in names:
                if len(names) >= MAX_ATTEMPT_METRIC_NAMES:
                    self.state["refused"] += 1
                    continue
                names.append(name)
            value, fault = item["values"].get(name), faults.get(name)
            self._add_row("metrics", **place, name=name, value=value, not_finite=fault)
            if fault and is_loss(name) and not self.state.get("has_metric_fault"):
                self.state["has_metric_fault"] = True
                # Without the step, because the script numbers steps in another way than the meter.
                self.mark("fault", item["time"], rank=item["rank"], text=f"loss is {fault}")

    def _update_progress(self, item: StepItem) -> None:
        times = self.state["step_times"][-SPEED_STEPS:] or [item["step_s"]]
        rates = {
            "rate": _compute_rate([(item["tokens"], seconds) for seconds in times]),
            "sample_rate": _compute_rate(self.state.get("sample_rates", [])),
        }
        progress: Any = self.state["progress"]
        if progress is not None and item["step"] <= progress["step"]:
            progress.update(rates)
            return
        names = ("step", "steps", "step_s", "tokens", "time", "learning_rate", "grad_norm")
        new_progress: Any = {name: item[name] for name in names}  # type: ignore[literal-required]
        self.state["progress"] = new_progress | rates | {"over": item.get("over", 1)}

    def _add_phase(self, item: PhaseItem) -> None:
        rank = self._get_rank_state(item["rank"])
        changed, rank["phase"] = item["phase"] != rank["phase"], item["phase"]
        if "cells" in item:
            # The phase "step" of a script begins after its first steps.
            rank["ran"], rank["exact"] = max(0, item.get("steps", 0) - SCRIPT_SETUP_STEPS), item["cells"]
            self._add_cells(item["rank"], item["time"], item["cells"])
        if item["rank"] != 0:
            return
        if "steps" in item:
            progress: Any = self.state["progress"] or {"steps": None, "rate": None}
            self.state["progress"] = progress | {"step": max(item["steps"], progress.get("step", 0))}
        if changed:
            self.mark("phase", item["time"], rank=0, step=item.get("steps"), text=item["phase"])

    def _add_log(self, item: LogItem) -> None:
        """Add complete lines to the table, and lines that can still change to the state."""
        if item["lines"] or "skipped" in item:
            log: dict[str, Any] = {name: item[name] for name in ("time", "rank", "first", "lines")}
            self._add_row("logs", **log, node=self._node, skipped=item.get("skipped", 0))
        open_logs, key = self.state.setdefault("open_logs", {}), f"{self._node}/{item['rank']}"
        open_logs.pop(key, None)
        if lines := item.get("open"):
            first = item["first"] + len(item["lines"])
            open_logs[key] = OpenLog(node=self._node, rank=item["rank"], time=item["time"], first=first, open=lines)

    def _add_verdict(self, item: VerdictItem) -> None:
        self.state["verdicts"][item["rank"]] = item["rows"]
        if "peak_bytes" in item:
            self.state["peaks"][item["rank"]] = item["peak_bytes"]
        if "memory" in item:
            self.state.setdefault("memory", {})[item["rank"]] = item["memory"]

    def _add_checkpoint(self, item: CheckpointItem) -> None:
        others = [other for other in self.state["checkpoints"] if other["step"] != item["step"]]
        self.state["checkpoints"] = [*others, item][-MAX_CHECKPOINTS:]
        kind, text = "checkpoint" if item["name"] else "fault", item["name"] or item["problem"]
        place = {"rank": item["rank"], "step": item["step"]}
        self.mark(kind, item["time"], **place, text=text, value=item["num_bytes"])

    def _add_timeline(self, item: TimelineItem) -> None:
        if not 0 <= item["began"] + self._offset_s < MAX_UNIX_S:
            raise ValueError("no time")
        tables: list[Any] = [item["calls"], item["spans"]]
        for columns in tables:
            if len({len(column) for column in columns.values()}) != 1:
                raise ValueError("columns differ in length")
        calls, spans = convert_timeline(item, self._offset_s)
        self._extend("calls", calls)
        self._extend("spans", spans)

    def _extend(self, table: str, added: Columns) -> None:
        if not added["step"]:
            return
        for name, column in self._columns(table).items():
            column.extend(added[name])

    def _add_start(self, item: StartItem) -> None:
        if len(self.state["starts"]) >= MAX_STARTS:
            return
        stage = StartedStage(node=self._node, rank=item["rank"], stage=item["stage"], time=item["time"])
        self.state["starts"].append(stage)
        self.mark("start", item["time"], rank=item["rank"], text=item["stage"])


def _store_stack(items: dict[int, Any], item: StallItem | ProcessItem) -> None:
    if len(items) < MAX_STALLED_RANKS:
        items[item["rank"]] = {**item, "stack": item["stack"][-MAX_FRAMES:]}


def _compute_rate(steps: list[tuple[int | None, float]]) -> float | None:
    """Return the amount per second of several steps, or None if it is unknown."""
    known = [(amount, seconds) for amount, seconds in steps if amount is not None]
    amount, seconds = sum(amount for amount, _ in known), sum(seconds for _, seconds in known)
    return amount / seconds if known and seconds > amount / MAX_ABS_NUMBER else None


def _to_float32(seconds: float) -> float:
    return min(seconds, MAX_FLOAT32)


def _convert_axes(seconds_by_axis: dict[str, float]) -> list[tuple[str, float]]:
    return [(axis, _to_float32(seconds)) for axis, seconds in seconds_by_axis.items()]
