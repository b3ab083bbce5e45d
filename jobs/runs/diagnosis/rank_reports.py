"""Track what ranks report: progress, processes, step times with their parts, stages of the start, and script steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from contracts.telemetry.batches import Item
from contracts.telemetry.items import (
    LIVE_STEPS,
    TIMED_STEPS,
    WARMUP_STEPS,
    CheckpointItem,
    GaugeItem,
    Phase,
    ProcessItem,
    StallItem,
    StartItem,
    StepBreakdown,
    StepItem,
    list_step_times,
)
from jobs.core.verdict_schema import Cause, StartPart, StepPart, StepParts
from jobs.runs.diagnosis.findings import RunFinding, format_seconds
from jobs.runs.diagnosis.planned_run import PlannedRun
from planner.facts.validation import format_count


class RankProgress:
    """Record when anything last ended on a rank, by the board's clock.

    Progress is the end of a collective, a step, or a stage of the start, a new phase, a checkpoint, or a validation.
    """

    def __init__(self) -> None:
        self._completed: dict[int, dict[tuple[str, str, str, int], int]] = {}
        self._last: dict[int, float] = {}
        self.phases: dict[int, Phase] = {}
        self.blocked: dict[int, StallItem] = {}
        self.last_contact: dict[int, float] = {}  # by node

    def add(self, item: Item, node: int) -> None:
        time = item["time"]
        self.last_contact[node] = max(time, self.last_contact.get(node, time))
        match item["kind"]:
            case "traffic":
                known = self._completed.setdefault(item["rank"], {})
                before = sum(known.values())
                for cell in item["cells"]:
                    known[cell["phase"], cell["op"], cell["axis"], cell["group_size"]] = cell["completed"]
                if sum(known.values()) != before:
                    self._record_progress(item["rank"], time)
            case "standing":
                self._update_blocked(item)
            case "phase":
                self.phases[item["rank"]] = item["phase"]
                self._record_progress(item["rank"], time)
            case "step" | "eval" | "checkpoint" | "start" | "proof" | "verdict":
                self._record_progress(item["rank"], time)
            case _:
                pass

    def _update_blocked(self, item: StallItem) -> None:
        rank = item["rank"]
        self._record_progress(rank, item["time"] - item["still"])
        if item["still"] > 0:
            self.blocked[rank] = item
        else:
            self.blocked.pop(rank, None)

    def _record_progress(self, rank: int, time: float) -> None:
        if rank < 0:
            return
        self._last[rank] = max(time, self._last.get(rank, time))
        blocked = self.blocked.get(rank)
        if blocked is not None and time > blocked["time"]:
            del self.blocked[rank]

    def get_last_progress(self, rank: int) -> float | None:
        return self._last.get(rank)

    @property
    def last_progress(self) -> float | None:
        return max(self._last.values(), default=None)

    @property
    def last_message(self) -> float | None:
        return max(self.last_contact.values(), default=None)


MAX_SAMPLES = 16  # per rank
MAX_AGE_S = 20.0  # older samples are ignored
MIN_THROTTLED_SAMPLES = 2
THROTTLED = 0.2  # seconds per second that a quota delays a process
MIN_EXPLAINED = 2 / 3  # of a delay, by additional waits for a CPU core
SLOW_CLOCK = 0.9  # relative to other GPUs


class DelayCause(NamedTuple):
    """Explain why a rank is late."""

    cause: Cause
    reason: str


class ProcessStates:
    """Store the latest samples of each process."""

    def __init__(self) -> None:
        self._process: dict[int, ProcessItem] = {}
        self._throttled: dict[int, deque[ProcessItem]] = {}  # last samples that were stopped or throttled
        self._crowds: dict[int, deque[tuple[float, float]]] = {}  # time, seconds per second
        self._gauge: dict[int, GaugeItem] = {}

    def add_process(self, item: ProcessItem) -> None:
        self._process[item["rank"]] = item
        crowds = self._crowds.setdefault(item["rank"], deque(maxlen=MAX_SAMPLES))
        crowds.append((item["time"], item.get("crowded", 0.0)))
        if item["state"] == "stopped" or item["throttled"] >= THROTTLED:
            self._throttled.setdefault(item["rank"], deque(maxlen=MIN_THROTTLED_SAMPLES)).append(item)

    def add_gauge(self, item: GaugeItem) -> None:
        if item["rank"] >= 0:
            self._gauge[item["rank"]] = item

    def get_process(self, rank: int, now: float) -> ProcessItem | None:
        """Return the latest sample of a rank, None if it is old."""
        item = self._process.get(rank)
        return item if item is not None and now - item["time"] <= MAX_AGE_S else None

    def get_throttled_ranks(self, now: float) -> list[int]:
        """Return ranks that were recently stopped or throttled more than once."""
        return [
            rank
            for rank, items in self._throttled.items()
            if len(items) == MIN_THROTTLED_SAMPLES and now - items[0]["time"] <= MAX_AGE_S
        ]

    def explain_slow_compute(self, rank: int, others: Iterable[int], now: float) -> DelayCause | None:
        """Explain why a rank computes longer than other ranks."""
        sample = self._throttled[rank][-1] if rank in self._throttled else None
        if sample is not None and now - sample["time"] <= MAX_AGE_S:
            if sample["state"] == "stopped":
                return DelayCause("stopped", f"The process of rank {rank} was stopped recently.")
            throttled = format_seconds(sample["throttled"])
            return DelayCause("quota", f"A CPU quota throttles rank {rank} for {throttled} of each second.")
        own = self._get_clock_mhz(rank)
        clocks = [clock for other in others if (clock := self._get_clock_mhz(other))]
        if own and clocks and own < SLOW_CLOCK * median(clocks):
            usual_mhz = median(clocks)
            text = f"The GPU of rank {rank} runs at {own:.0f} MHz, but other GPUs run at {usual_mhz:.0f} MHz."
            return DelayCause("compute", text)
        return None

    def explain_by_cpu_waits(self, rank: int, others: Sequence[int], now: float, delay_s: float) -> DelayCause | None:
        """Explain that a rank is `delay_s` seconds per second slower by its waits for a CPU core."""
        own_s = self._get_cpu_wait(rank, now)
        longer_s = own_s - median([self._get_cpu_wait(other, now) for other in others] or [0.0])
        if longer_s < MIN_EXPLAINED * delay_s:
            return None
        waited = format_seconds(own_s)
        text = f"Rank {rank} waits {waited} of each second for a CPU core that other processes use."
        return DelayCause("contention", text)

    def _get_cpu_wait(self, rank: int, now: float) -> float:
        """Return the mean of recent waits in seconds per second, 0 if none is known."""
        recent = [crowded for time, crowded in self._crowds.get(rank, ()) if now - time <= MAX_AGE_S]
        return fmean(recent) if recent else 0.0

    def _get_clock_mhz(self, rank: int) -> float:
        """Return the clock of the rank's GPU, 0 if it is unknown."""
        gauge = self._gauge.get(rank)
        return gauge.get("gpu_clock_mhz", 0.0) if gauge is not None else 0.0


MEASURED_STEPS = 64  # at most
MAX_RANK_STEPS = 65_536  # steps times ranks in memory


def get_num_measured_steps(world_size: int) -> int:
    """Return the number of last steps that a measurement covers."""
    return max(4, min(MEASURED_STEPS, MAX_RANK_STEPS // max(1, world_size)))


class RankStepTime(NamedTuple):
    """Hold the step time of one rank."""

    step_s: float
    parts: StepBreakdown | None


class StepTimings:
    """Collect the last steps of all ranks."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._rows: dict[int, dict[int, RankStepTime]] = {}
        self._max_steps = get_num_measured_steps(run.world_size)
        self._recent_times: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._steps_by_rank: dict[int, int] = {}
        self._step_times: deque[float] = deque(maxlen=TIMED_STEPS)  # of rank 0
        self._checkpoints: deque[CheckpointItem] = deque(maxlen=MEASURED_STEPS)
        self.last = 0  # steps completed by any rank
        self.ran = 0  # steps completed in this attempt
        self.longest_s = 0.0  # recently, on any rank

    def add(self, item: StepItem) -> None:
        step = item["step"]
        self.last, self.ran = max(self.last, step), max(self.ran, item["ran"])
        self._steps_by_rank[item["rank"]] = step
        if item["ran"] <= WARMUP_STEPS:
            return
        if item["rank"] == 0:
            self._step_times.extend(list_step_times(item))
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = {}
            while len(self._rows) > self._max_steps:
                del self._rows[min(self._rows)]
            self._recent_times.append(item["step_s"])
        row[item["rank"]] = RankStepTime(item["step_s"], item.get("parts"))
        self.longest_s = max(self._recent_times)

    def add_checkpoint(self, item: CheckpointItem) -> None:
        self._checkpoints.append(item)

    @property
    def longest_save_s(self) -> float:
        """Return the longest recent time for which training waited for a checkpoint."""
        return max((item["stall_s"] for item in self._checkpoints), default=0.0)

    @property
    def first(self) -> int:
        """Return the first step after the warm-up of this attempt."""
        return self.last - self.ran + WARMUP_STEPS + 1

    def get_num_steps(self, rank: int) -> int:
        """Return the steps that a rank has completed."""
        return self._steps_by_rank.get(rank, 0)

    @property
    def median_s(self) -> float | None:
        """Return the median of recent step times after the warm-up, None before any."""
        return median(self._recent_times) if self._recent_times else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps that the measurement covers."""
        return tuple(sorted(self._rows))

    def get_checkpoint_s(self) -> float:
        """Return the recent wait for checkpoints in seconds per step."""
        if not self._checkpoints:
            return 0.0
        first, *others = self._checkpoints
        if not others:
            return first["stall_s"] / max(1, self.ran)
        return sum(item["stall_s"] for item in others) / max(1, others[-1]["step"] - first["step"])

    def compute_parts(
        self, waiting: Mapping[str, float], inferred: Mapping[str, float], bubble_s: float | None, *, ended: bool
    ) -> StepParts | None:
        """Return the step time of the job page with its parts: means over ranks, scaled to that step time.

        The step time is the median of rank 0, over the last LIVE_STEPS steps, or TIMED_STEPS if the run has `ended`.
        All arguments are seconds per step.

        Args:
            waiting: Exposed time by axis in which ranks waited for a late rank.
            inferred: Exposed time by axis that the meter counted as compute.
            bubble_s: Idle time of the pipeline schedule, None if unknown.
        """
        rank_steps = [rank_step for row in self._rows.values() for rank_step in row.values()]
        if not rank_steps:
            return None
        mean_s, checkpoint_s = fmean(rank_step.step_s for rank_step in rank_steps), self.get_checkpoint_s()
        times = [*self._step_times][0 if ended else -LIVE_STEPS :]
        step_s, steps = (median(times), len(times)) if times and mean_s else (mean_s, len(self._rows))
        timed_parts = [rank_step.parts for rank_step in rank_steps if rank_step.parts is not None]
        parts = (
            _compute_mean_parts(timed_parts, mean_s, waiting, inferred, bubble_s)
            if timed_parts
            else [_make_part("compute", "compute", mean_s)]
        )
        for part in parts:
            part["seconds"] *= step_s / (mean_s or 1.0)
            part["waiting_s"] *= step_s / (mean_s or 1.0)
        if checkpoint_s > 0:
            parts.append(_make_part("checkpoint", "checkpoint", checkpoint_s))
        return {"step_s": step_s + checkpoint_s, "sure": 0.0, "steps": steps, "parts": parts}


def _compute_mean_parts(
    timed: list[StepBreakdown],
    step_s: float,
    waiting: Mapping[str, float],
    inferred: Mapping[str, float],
    bubble_s: float | None,
) -> list[StepPart]:
    """Return parts in the order of the page. Compute is the rest of the step."""
    # An unknown part is part of compute.
    data = fmean(parts.get("data", 0.0) for parts in timed)
    optimizer = fmean(parts.get("optimizer", 0.0) for parts in timed)
    exposed = {
        axis: _compute_mean(timed, "exposed", axis) + inferred.get(axis, 0.0) for axis in _get_axes(timed, inferred)
    }
    hidden = {
        axis: max(0.0, _compute_mean(timed, "hidden", axis) - inferred.get(axis, 0.0)) for axis in _get_axes(timed, {})
    }
    bubble = 0.0
    for axis in ("pp", "world"):  # ranks wait at the end of the step until the pipeline is drained
        idle = min((bubble_s or 0.0) - bubble, exposed.get(axis, 0.0))
        if idle > 0:
            bubble, exposed[axis] = bubble + idle, exposed[axis] - idle
    scale = min(1.0, max(0.0, step_s - data - bubble) / (sum(exposed.values()) or 1.0))
    exposed = {axis: s * scale for axis, s in exposed.items()}  # inferred times come from other steps
    rest = step_s - data - optimizer - bubble - sum(exposed.values())
    if rest < 0:  # the optimizer was blocked by collectives too
        optimizer, rest = max(0.0, optimizer + rest), 0.0
    step_parts = [_make_part("data", "data", data), _make_part("compute", "compute", rest)]
    step_parts += [_make_part(axis, "exposed", s, min(s, waiting.get(axis, 0.0))) for axis, s in exposed.items()]
    step_parts += [_make_part("bubble", "bubble", bubble), _make_part("optimizer", "optimizer", optimizer)]
    step_parts = [part for part in step_parts if part["seconds"] > 0]
    return step_parts + [_make_part(axis, "hidden", s) for axis, s in hidden.items() if s > 0]


def _get_axes(timed: list[StepBreakdown], more: Mapping[str, float]) -> list[str]:
    return sorted({axis for parts in timed for axis in (*parts["exposed"], *parts["hidden"])} | set(more))


def _compute_mean(timed: list[StepBreakdown], which: Literal["exposed", "hidden"], axis: str) -> float:
    return fmean(parts[which].get(axis, 0.0) for parts in timed)


def _make_part(name: str, kind: str, value: float, waiting: float = 0.0) -> StepPart:
    return {"name": name, "kind": kind, "seconds": value, "waiting_s": waiting}  # type: ignore[typeddict-item]


StageName = Literal["queue", "claim", "spawn", "import", "rendezvous", "build", "first step"]
START_STAGES: tuple[tuple[str, StageName], ...] = (
    ("claimed", "claim"),
    ("spawned", "spawn"),
    ("imported", "import"),
    ("met", "rendezvous"),
    ("built", "build"),
    ("first step", "first step"),
)


class StartStages:
    """Record when the last rank completed each stage of the start."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._last: dict[str, tuple[float, int]] = {}

    def add(self, item: StartItem) -> None:
        stage, reached = item["stage"], (item["time"], item["rank"])
        self._last[stage] = max(self._last.get(stage, reached), reached)

    def get_parts(self) -> list[StartPart]:
        """Return the durations of stages after submit. A stage that no rank reported is part of the next stage."""
        parts: list[StartPart] = []
        previous = self._run.submitted
        if previous is not None and self._run.ordered is not None:
            parts.append({"name": "queue", "seconds": max(0.0, self._run.ordered - previous), "rank": -1})
        previous = self._run.ordered if self._run.ordered is not None else previous
        for stage, name in START_STAGES:
            if stage not in self._last:
                continue
            time, rank = self._last[stage]
            if previous is not None:
                parts.append({"name": name, "seconds": max(0.0, time - previous), "rank": rank})
            previous = max(previous, time) if previous is not None else time
        return parts

    @property
    def reached(self) -> str:
        """Return the last stage that a rank reported, or ""."""
        return next((stage for stage, _ in reversed(START_STAGES) if stage in self._last), "")


SCRIPT_REASON = "The first step of a script has no step time. Meshboard finds the steps of a script by its optimizer."
NO_STEP_HINT = "Call `meshboard.step()` in the script to mark its steps."


class ScriptSteps:
    """Count the steps of a script without a step time. Runs of Meshboard's trainer are ignored."""

    def __init__(self, *, is_script: bool) -> None:
        self._is_script = is_script
        self._steps, self._has_sent = 0, False

    def add(self, item: Item) -> None:
        if item["kind"] == "phase":
            self._steps = max(self._steps, item.get("steps", 0))
        elif item["kind"] == "traffic":
            self._has_sent = self._has_sent or any(cell["count"] for cell in item["cells"])

    def end(self, report: Mapping[str, Any] | None) -> None:
        """Read the number of steps from the exit report."""
        summary = (report or {}).get("summary") or {}
        self._steps = max(self._steps, summary.get("steps") or 0)

    def make_finding(self, outcome: str | None, why_cancelled: str) -> RunFinding | None:
        """Return the finding of a script, or None without any count. `why_cancelled`: a full sentence."""
        if not self._is_script or not (self._steps or self._has_sent):
            return None
        seen = format_count(self._steps, "step") if self._steps else "no step"
        following = "" if self._steps else NO_STEP_HINT
        if outcome is None:
            sentence = f"Not checked: the script has run {seen} so far."
            return RunFinding("well", 0.0, sentence, SCRIPT_REASON, following)
        if outcome == "cancelled":
            return RunFinding(
                "starting", 0.0, f"Not checked: the script was cancelled after {seen}.", why_cancelled, ""
            )
        ended = f"after {seen}" if self._steps else "without a step"
        return RunFinding("starting", 0.0, f"Not checked: the script ended {ended}.", SCRIPT_REASON, following)
