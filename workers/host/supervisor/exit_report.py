"""The exit report of an attempt: how it ended, and a summary of the ranks' telemetry in limited bytes."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from statistics import median
from typing import Any, NamedTuple

from contracts.codec import MAX_EXIT_REPORT_BYTES, BadMessageError, validate_exit_report
from contracts.control import (
    HOST_STOPPED_REASON,
    VERSION,
    ExitReport,
    HostFault,
    LaunchOrder,
    LossPoint,
    Outcome,
    StepTiming,
    Summary,
)
from contracts.fields import CHECKPOINT_NAME_PATTERN, MAX_ABS_NUMBER, MAX_TEXT_CHARS
from contracts.telemetry.batches import Item
from contracts.telemetry.items import (
    SCRIPT_SETUP_STEPS,
    SPEED_STEPS,
    TIMED_STEPS,
    WARMUP_STEPS,
    Cell,
    CheckpointItem,
    StepItem,
    TrafficItem,
    list_step_times,
)
from contracts.telemetry.metrics import MetricItem, MetricSeries, find_loss, is_loss
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from planner.facts.validation import format_count
from workers.host.attempts import AttemptDir
from workers.host.hook import NOT_METERED_NOTE
from workers.host.job_limits import JobLimits
from workers.host.programs import get_program
from workers.host.rank_files import LAUNCHER_RANK, RankFailure, clean_line, get_signal_name
from workers.host.supervisor.failure_evidence import FailureEvidence
from workers.host.supervisor.log_tail import LogTail
from workers.host.supervisor.memory_kills import MemoryKillWatch
from workers.host.upload_environment import EXIT_CODE as ENVIRONMENT_EXIT_CODE

log = logging.getLogger(__name__)

MAX_POINTS = 500  # of a loss curve
MAX_CHECKPOINTS = 100
MAX_CELLS = 20_000  # of all ranks; a script can create any number of groups
MAX_SUMMARY_BYTES = 3 * 2**19  # as JSON; with the log's tail an exit report stays below MAX_EXIT_REPORT_BYTES
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")  # another process sent them
GPU_FAULT = re.compile(r"uncorrectable (NVLink|ECC) error|\bXid\b.*\d|GPU has fallen off the bus", re.IGNORECASE)
SETUP_FAULT = re.compile(
    r"no CUDA-capable device is detected|driver version is insufficient|CUDA unknown error"
    r"|devices? .*(busy or unavailable|unavailable or busy)|no socket interface found"
    r"|Unable to find (address|interface) for",
    re.IGNORECASE,
)
LEFT_OUT_BYTES = 64  # for the number of ranks that are left out

CellKey = tuple[str, str, str, int]


def get_cell_key(cell: Cell) -> CellKey:
    """Return the identity of a cell. A newer cell with the same key replaces it."""
    return cell["phase"], cell["op"], cell["axis"], cell["group_size"]


class ThinnedCurve:
    """A curve of at most MAX_POINTS. When it is full, every second point is dropped. The last point is always kept."""

    def __init__(self) -> None:
        self._kept: list[LossPoint] = []
        self._last: LossPoint | None = None
        self._num_points, self._stride = 0, 1

    @property
    def points(self) -> list[LossPoint]:
        if self._last is None or self._kept[-1:] == [self._last]:
            return self._kept
        return [*self._kept, self._last]

    def add(self, step: int, loss: float, time: float) -> None:
        self._num_points += 1
        self._last = LossPoint(step=step, loss=loss, time=time)
        if self._num_points % self._stride == 0:
            self._kept.append(self._last)
        if len(self._kept) == MAX_POINTS:
            self._kept = self._kept[1::2]
            self._stride *= 2


class SummaryBuilder:
    """Summarize the telemetry of an attempt. `first_rank`, the first rank of this host, defines the progress."""

    def __init__(self, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._cells: dict[int, dict[CellKey, Cell]] = {}
        self._num_cells = 0
        self._overflown: set[int] = set()  # ranks with more cells than the limit
        self._losses, self._eval_losses = ThinnedCurve(), ThinnedCurve()
        self._loss_series: MetricSeries | None = None  # of a script
        self._verdict: dict[int, list[VerdictRow]] = {}
        self._checkpoints: deque[CheckpointItem] = deque(maxlen=MAX_CHECKPOINTS)
        self.dry_runs: dict[int, DryRunItem] = {}
        self._peaks: dict[str, int] = {}
        self._memory: dict[str, MemoryParts] = {}
        self._proof: ProofItem | None = None
        self._profile: dict[str, Any] | None = None
        self._lab: dict[str, Any] | None = None
        self._speeds: deque[tuple[int | None, int | None, float]] = deque(
            maxlen=SPEED_STEPS
        )  # tokens, samples, seconds
        self._step_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self.steps = self._ran = 0
        self.training = False

    def stopped_early(self, planned_steps: int) -> bool:
        """Return whether steps are left. A run that resumes after its last step has a verdict and no step."""
        return self.steps < planned_steps and not self._verdict

    @property
    def newest_checkpoint(self) -> str | None:
        """Return the name of the newest complete checkpoint."""
        names = (item["name"] or "" for item in reversed(self._checkpoints))
        return next((name for name in names if re.fullmatch(CHECKPOINT_NAME_PATTERN, name)), None)

    def add(self, item: Item) -> None:
        """Add one checked item of a rank."""
        if item["kind"] == "traffic":
            self._add_traffic(item)
        elif item["kind"] == "step":
            self._add_step(item)
        elif item["kind"] == "metric":
            self._add_metrics(item)
        elif item["kind"] == "eval":
            self._eval_losses.add(item["step"], item["loss"], item["time"])
        elif item["kind"] == "phase":
            self.training = self.training or item["phase"] == "step"
            if item["rank"] == self._first_rank and item.get("steps", 0) > self.steps:
                self.steps = item["steps"]
                self._ran = max(0, self.steps - SCRIPT_SETUP_STEPS)  # the phase "step" begins after them
        elif item["kind"] == "gauge":
            if "peak_bytes" in item:
                self._peaks[str(item["rank"])] = item["peak_bytes"]
        elif item["kind"] == "profile":
            self._profile = item["profile"]
        elif item["kind"] == "lab":
            self._lab = item["result"]
        elif item["kind"] == "checkpoint":
            self._checkpoints.append(item)
        elif item["kind"] == "dry_run":
            self.dry_runs[item["rank"]] = item
        elif item["kind"] == "proof":
            self._proof = item
        elif item["kind"] == "verdict":
            self._verdict[item["rank"]] = item["rows"]
            if "peak_bytes" in item:
                self._peaks[str(item["rank"])] = item["peak_bytes"]
            if "memory" in item:
                self._memory[str(item["rank"])] = item["memory"]

    def build(self) -> Summary:
        """Return the summary, which stays with the job when its telemetry stream has expired.

        Parts that exceed MAX_SUMMARY_BYTES are left out. The cells of the last ranks are left out first, and the number
        of these ranks is stated.
        """
        summary = Summary(
            steps=self.steps,
            tokens_per_s=_compute_rate([(tokens, seconds) for tokens, _, seconds in self._speeds]),
            losses=self._losses.points,
            eval_losses=self._eval_losses.points,
            cells={},
            verdict={},
        )
        if self._step_s:
            summary["measured"] = StepTiming(steps=len(self._step_s), step_s=median(self._step_s))
        if (samples_per_s := _compute_rate([(samples, seconds) for _, samples, seconds in self._speeds])) is not None:
            summary["samples_per_s"] = samples_per_s
            summary["samples"] = next(samples for _, samples, _ in reversed(self._speeds) if samples is not None)
        if self._ran != self.steps:
            summary["ran_steps"] = self._ran
        if self._checkpoints:
            summary["checkpoints"] = list(self._checkpoints)
        if self._proof is not None:
            summary["proof"] = self._proof
        left = MAX_SUMMARY_BYTES - _measure(summary) - LEFT_OUT_BYTES
        optional = (
            ("peak_bytes", self._peaks or None),
            ("memory", self._memory or None),
            ("profile", self._profile),
            ("lab", self._lab),
            ("dry_runs", list(self.dry_runs.values()) or None),
        )
        for name, value in optional:
            if value is not None and (left := left - _measure(value)) >= 0:
                summary[name] = value  # type: ignore[literal-required]
        for rank, rows in sorted(self._verdict.items()):
            if (left := left - _measure(rows)) >= 0:
                summary["verdict"][str(rank)] = rows
        for rank, cells in sorted(self._cells.items()):
            if (left := left - _measure(list(cells.values()))) >= 0:
                summary["cells"][str(rank)] = list(cells.values())
        complete = {int(rank) for rank in summary["cells"]} - self._overflown
        if left_out := len(self._cells) - len(complete):
            summary["cells_left_out"] = left_out
        return summary

    def _add_traffic(self, item: TrafficItem) -> None:
        cells = self._cells.setdefault(item["rank"], {})
        for cell in item["cells"]:
            key = get_cell_key(cell)
            if key not in cells:
                if self._num_cells >= MAX_CELLS:
                    self._overflown.add(item["rank"])
                    continue
                self._num_cells += 1
            cells[key] = cell

    def _add_metrics(self, item: MetricItem) -> None:
        """Add the loss of a script. A preferred series replaces the curve so far."""
        for name, loss in item["values"].items():
            series = MetricSeries(name, item["source"], item["rank"])
            if not is_loss(name):
                continue
            preferred = find_loss(filter(None, (self._loss_series, series)))
            if preferred != self._loss_series:
                self._loss_series, self._losses = series, ThinnedCurve()
            if preferred == series:
                self._losses.add(item["step"], loss, item["time"])

    def _add_step(self, item: StepItem) -> None:
        if item["rank"] != self._first_rank:
            return
        if item["ran"] > WARMUP_STEPS:
            self._step_s.extend(list_step_times(item))
        self.steps, self._ran = item["step"], item.get("counted", item["ran"])
        self._speeds.append((item["tokens"], item.get("samples"), item["step_s"]))
        if item["loss"] is not None:
            self._losses.add(item["step"], item["loss"], item["time"])


class AttemptEnd(NamedTuple):
    """The end of torchrun, by this host's clock."""

    code: int  # -N for signal N
    failure: RankFailure | None
    ended_by: Outcome | None  # set if the supervisor ended the attempt
    reason: str
    started: float
    offset_s: float = 0.0  # the board's clock minus this host's clock
    preempted: bool = False
    memory_kills: MemoryKillWatch | None = None
    host_fault: HostFault | None = None  # of a failed launch
    limits: JobLimits | None = None


def build_exit_report(
    attempt: AttemptDir, order: LaunchOrder, end: AttemptEnd, summary: SummaryBuilder, tail: LogTail
) -> ExitReport:
    """Build a valid exit report. If the summary makes it invalid, the summary is left out."""
    failure = end.failure
    rank = None if failure is None else failure.rank
    evidence = _find_evidence(end, tail)
    outcome, reason = _get_outcome(order, end, summary, tail, evidence)
    report = ExitReport(
        v=VERSION,
        job=attempt.job,
        attempt=attempt.attempt,
        outcome=outcome,
        reason=reason[:MAX_TEXT_CHARS],
        exit_code=end.code if failure is None else failure.exit_code,
        rank=rank,
        signal=get_signal_name(end.code) if failure is None else failure.signal,
        log_tail=tail.get_last_lines(LAUNCHER_RANK if rank is None else rank) if outcome == "failed" else [],
        started=end.started + end.offset_s,
        finished=time.time() + end.offset_s,
        summary=summary.build(),
    )
    if failure is not None and outcome == "failed":
        if failure.time is not None:
            report["failed_at"] = failure.time + end.offset_s
        report["lost_peer"] = failure.lost_peer
    if outcome == "failed":
        _add_evidence(report, evidence)
        if report["signal"] == "SIGKILL" and end.memory_kills is not None:
            report["kill"] = end.memory_kills.describe(None if failure is None else failure.pid)
        errors = " ".join((reason, evidence.message or "", evidence.first or ""))
        if end.limits is not None and end.ended_by is None and (limit := end.limits.explain_error(errors)):
            report["reason"] = f"{limit} Error: {reason}"[:MAX_TEXT_CHARS]
        if host_fault := end.host_fault or find_rank_fault(report, has_steps=summary.training):
            report["host_fault"] = host_fault
    if end.preempted:
        report["preempted"] = True
    problem = _find_problem(report)
    if problem:
        log.error("exit report without summary: %s", problem)
        report["summary"], report["log_tail"] = None, []
        report.pop("evidence", None)
        report["reason"] = f"{report['reason'][:600]} (the summary of the ranks is missing: {problem[:300]})"
    return report


def find_rank_fault(report: ExitReport, *, has_steps: bool) -> HostFault | None:
    """Return "ranks" if the log shows that the host caused the failure. After the first step, only GPU errors count."""
    texts = (report["reason"], report.get("error", ""), report.get("first_error", ""))
    patterns = (GPU_FAULT,) if has_steps else (GPU_FAULT, SETUP_FAULT)
    return "ranks" if any(pattern.search(text) for pattern in patterns for text in texts) else None


def describe_save(summary: SummaryBuilder, why: str) -> str:
    """Return the reason of a run that saved a checkpoint and stopped on request."""
    checkpoint = summary.newest_checkpoint
    newest = f"newest checkpoint {checkpoint}" if checkpoint else "no checkpoint was written"
    return f"stopped after step {summary.steps} {why}; {newest}"


def _find_problem(report: ExitReport) -> str:
    """Return why a reader would reject the report. Empty if it is valid."""
    try:
        validate_exit_report(report)
    except BadMessageError as error:
        return str(error)
    size = _measure(report)
    return f"{size:,} bytes, more than the limit of {MAX_EXIT_REPORT_BYTES:,}" if size > MAX_EXIT_REPORT_BYTES else ""


def _find_evidence(end: AttemptEnd, tail: LogTail) -> FailureEvidence:
    """Return the evidence of a failure in the log of the failed rank, or of the launcher."""
    if end.reason == HOST_STOPPED_REASON:  # the launcher logs an exception about the signal that stopped it
        return FailureEvidence()
    if end.failure is None:
        if end.code <= 0 or end.ended_by not in (None, "failed"):
            return FailureEvidence()
        return tail.find_evidence(LAUNCHER_RANK, "", by_signal=False)
    if end.failure.signal in OUTSIDE_SIGNALS:  # an error in the log is not the cause
        return FailureEvidence()
    recorded = "" if end.failure.signal else end.failure.message
    return tail.find_evidence(end.failure.rank, recorded, by_signal=end.failure.signal is not None)


def _add_evidence(report: ExitReport, evidence: FailureEvidence) -> None:
    if evidence.message:
        report["error"] = clean_line(evidence.message)
    if evidence.first:
        report["first_error"] = clean_line(evidence.first)
    if evidence.lines:
        report["evidence"] = list(evidence.lines)


def _get_outcome(
    order: LaunchOrder, end: AttemptEnd, summary: SummaryBuilder, tail: LogTail, evidence: FailureEvidence
) -> tuple[Outcome, str]:
    if end.ended_by is not None:
        is_explained = end.ended_by == "failed" and end.failure is None and evidence.message
        return end.ended_by, f"{end.reason}: {clean_line(evidence.message)}" if is_explained else end.reason
    has_command = (order["spec"].get("script") or {}).get("command") is not None
    if end.code == 0:
        reason = get_program(order).success_reason
        if has_command and not summary.training:
            return "succeeded", f"the command finished. {NOT_METERED_NOTE}"
        if "{steps}" in reason and not summary.steps:
            return "succeeded", "finished; this attempt reported no steps"  # the previous attempt finished them
        return "succeeded", reason.format(steps=summary.steps, ranks=format_count(len(summary.dry_runs), "rank"))
    failure, after = end.failure, f" after step {summary.steps}" if summary.steps else ""
    if failure is None:
        killed_by = get_signal_name(end.code)
        how = f"was killed by {killed_by}" if killed_by else f"ended with exit code {end.code}"
        if end.code == ENVIRONMENT_EXIT_CODE and "upload" in order:
            return "failed", tail.get_last_error(LAUNCHER_RANK).removeprefix("meshboard: ")[:300]
        if not has_command:
            return "failed", f"torchrun {how}{after}"
        message = clean_line(evidence.message) or clean_line(tail.get_last_error(LAUNCHER_RANK))[:300]
        return "failed", f"the command {how}{after}" + (f": {message}" if message else "")
    if failure.signal:
        return "failed", f"rank {failure.rank} was killed by {failure.signal}{after}"
    message = clean_line(evidence.message) or clean_line(tail.get_last_error(failure.rank))[:300]
    return "failed", f"rank {failure.rank} ended with exit code {failure.exit_code}: {message}"


def _compute_rate(steps: list[tuple[int | None, float]]) -> float | None:
    """Return the amount per second of steps together, or None if it is unknown.

    A mean of rates would overweight fast steps. Steps with an unknown amount do not count.
    """
    known = [(amount, seconds) for amount, seconds in steps if amount is not None]
    amount, seconds = sum(amount for amount, _ in known), sum(seconds for _, seconds in known)
    return amount / seconds if known and seconds > amount / MAX_ABS_NUMBER else None


def _measure(value: object) -> int:
    return len(json.dumps(value))
