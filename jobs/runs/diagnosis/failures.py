"""Find failures: of the training (loss, gradient norm, replicas, checkpoints), and at the end of a run."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from statistics import median
from typing import Any

from contracts.control import HOST_STOPPED_REASON
from contracts.fields import strip_control_characters
from contracts.telemetry.items import CheckpointItem, GaugeItem, StepItem
from contracts.telemetry.metrics import MetricItem, MetricSeries, find_loss, is_loss
from contracts.telemetry.results import ProofItem, VerdictItem
from jobs.core.verdict_schema import MAX_TROUBLES, Action, Evidence, ReportedLoss, Trouble
from jobs.runs.diagnosis.findings import (
    RunFinding,
    format_difference,
    format_ranks,
    make_evidence,
    make_sentence,
    truncate,
)
from jobs.runs.diagnosis.out_of_memory import (
    OutOfMemory,
    cut_after_request,
    describe_request,
    list_memory_facts,
    parse_out_of_memory,
    suggest_micro_batches,
)
from jobs.runs.diagnosis.planned_run import PlannedRun
from planner.facts.validation import format_count

WINDOW_STEPS = 50  # in the recent median
MIN_STEPS = 20
DIVERGED_DEVIATIONS = 3.0  # above the recent median, for a loss that is also above the first loss
SPIKE_FACTOR = 10.0  # gradient norm over the recent median
DEVIATION_PER_MAD = 1.4826  # standard deviation over median absolute deviation, for normal noise


LOWER_RATE = "Lower the learning rate, or check the training data."
VALUES = {"nan": "NaN", "inf": "infinite", "-inf": "negative infinity"}


class TrainingHealth:
    """Collect loss and gradient norm of rank 0, verification results, and checkpoints."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._norms: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._first: float | None = None
        self._series: MetricSeries | None = None  # of the loss of a script
        self.reported: ReportedLoss | None = None  # the newest loss of this series
        self._high = 0  # consecutive steps with a loss far above the recent median
        self._last_normal, self._last_saved = 0, 0  # latest step with a normal loss, and latest step in a checkpoint
        self._trouble: dict[str, Trouble] = {}

    def add_step(self, item: StepItem) -> None:
        if "not_finite" in item:
            self._add("not finite", item["step"], f"{format_not_finite(item['not_finite'])} at step {item['step']}")
        loss, norm = item["loss"], item["grad_norm"]
        if loss is not None:
            self._add_loss(loss, item["step"])
            if not self._high and "not_finite" not in item:
                self._last_normal = max(self._last_normal, item["step"])
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= MIN_STEPS else None
            if usual and norm > SPIKE_FACTOR * usual:
                times = f"{norm / usual:.0f} times the recent median of {usual:.3g}"
                self._add("spike", item["step"], f"gradient norm {norm:.3g} at step {item['step']} is {times}")
            self._norms.append(norm)

    def add_metrics(self, item: MetricItem) -> None:
        """Add the loss that a script reports. A preferred series replaces the losses so far."""
        faults = item.get("not_finite", {})
        for name in filter(is_loss, [*item["values"], *faults]):
            series = MetricSeries(name, item["source"], item["rank"])
            preferred = find_loss(filter(None, (self._series, series)))
            if preferred != self._series:
                self._series, self._first, self._high = series, None, 0
                self._losses.clear()
            if preferred != series:
                continue
            self.reported = {
                "step": item["step"],
                "loss": item["values"].get(name),
                "not_finite": faults.get(name, ""),
                "source": item["source"],
            }
            place = f"report {item['step']}" if item["source"] == "numbered log line" else f"step {item['step']}"
            if name in faults:
                known = self._trouble.get("not finite")
                if known is None or self._last_normal > known["step"]:  # else the first step of several counts
                    self._add("not finite", item["step"], f"{format_not_finite(f'loss is {faults[name]}')} at {place}")
                continue
            self._add_loss(item["values"][name], item["step"])
            if not self._high:
                self._last_normal = max(self._last_normal, item["step"])

    def _add_loss(self, loss: float, step: int) -> None:
        if self._first is None:
            self._first = loss
        if len(self._losses) >= MIN_STEPS:
            usual = median(self._losses)
            spread = DEVIATION_PER_MAD * median(abs(x - usual) for x in self._losses)
            if loss > self._first and loss > usual + DIVERGED_DEVIATIONS * max(spread, 0.01 * abs(usual)):
                self._high += 1
                if self._high >= MIN_STEPS // 2:
                    bounds = f"the first loss ({self._first:.3g}) and the recent median ({usual:.3g})"
                    self._add("diverged", step, f"loss {loss:.3g} at step {step} is above {bounds}")
                return  # a high loss does not change the recent median
            self._high = 0
        self._losses.append(loss)

    def add_proof(self, item: ProofItem) -> None:
        for difference in item["wrong"][:1]:
            ranks = f" on {format_ranks(difference['ranks'])}" if difference["ranks"] else ""
            subject = f"{difference['what']} of {difference['name']} differs"
            text = f"{subject} from the single-process reference"
            if difference["axis"]:
                text = f"{subject} between replicas over {difference['axis']}"
            self._add("replicas apart", 0, f"{text}{ranks}")

    def add_checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._last_saved = max(self._last_saved, item["step"])
        if item["problem"]:
            text = f"could not write the checkpoint after step {item['step']}: {item['problem']}"
            self._add("checkpoint failed", item["step"], text)

    def _add(self, kind: str, step: int, text: str) -> None:
        """Store the latest problem of each kind."""
        self._trouble[kind] = {"kind": kind, "step": step, "text": truncate(text)}  # type: ignore[typeddict-item]

    def _is_over(self, trouble: Trouble) -> bool:
        """Return True if the problem is over, because later steps or checkpoints are normal."""
        if trouble["kind"] == "checkpoint failed":
            return self._last_saved > trouble["step"]
        return trouble["kind"] != "replicas apart" and self._last_normal - trouble["step"] >= MIN_STEPS

    def get_troubles(self) -> list[Trouble]:
        return list(self._trouble.values())[:MAX_TROUBLES]

    def make_findings(self) -> Iterator[RunFinding]:
        for trouble in self._trouble.values():
            if trouble["kind"] != "spike" and not self._is_over(trouble):
                yield _make_finding(trouble)


def format_not_finite(text: str) -> str:
    """Return "the gradient norm is NaN" for "gradient norm is nan"."""
    values = re.sub(r"\bis (nan|-?inf)\b", lambda found: f"is {VALUES[found[1]]}", text)
    return " and ".join(f"the {part}" for part in values.split(" and "))


def _make_finding(trouble: Trouble) -> RunFinding:
    text, step = trouble["text"], trouble["step"]
    facts = (make_evidence(text, (), (step,) if step else ()),)
    match trouble["kind"]:
        case "not finite":
            return RunFinding("failed", 1.0, f"Diverged: {text}.", "", LOWER_RATE, facts, "copy_job")
        case "diverged":
            reason = "The loss has stayed far above its recent median."
            following = "Resume from an earlier checkpoint with a lower learning rate."
            return RunFinding("failed", 1.0, f"Diverged: {text}.", reason, following, facts)
        case "replicas apart":
            reason = "The verification found a difference larger than rounding."
            following = "Read the differences under Verification."
            return RunFinding("failed", 1.0, f"Diverged: {text}.", reason, following, facts)
    reason = make_sentence(text.partition(": ")[2])
    sentence = f"Failed: the checkpoint after step {step} could not be written."
    following = "Free disk space on the host, or check its disk."
    return RunFinding("notice", 1.0, sentence, reason, following, facts, "open_log")


LINES = 3  # log lines in the evidence
MAX_REASON = 200  # characters in the verdict: the evidence holds the full text
EXIT_CODE = re.compile(r"rank \d+ ended with exit code (?P<code>-?\d+): ?(?P<message>.*)", re.IGNORECASE)
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "/workers/meter/")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
KILLS_COMMAND = "`journalctl -k --grep='Killed process'`"
MARKS = frozenset("^~ \t")  # Python marks the failing code with these
NOT_FINITE = re.compile(  # the error of a run that ended at a NaN or an infinite value, see workers/trainer/trainer.py
    r"(?P<what>(?:validation )?(?:loss|gradient norm) is [^;]+) at step (?P<step>\d+); "
    r"learning rate \S+ \((?P<rate>\S+) at this step\), gradient clip (?P<clip>\S+), precision (?P<precision>\S+)$"
)
CAUSES = {
    "SIGKILL": "The usual causes are the kernel's out-of-memory killer, a user, and a batch system.",
    "SIGSEGV": "The process accessed invalid memory, often in native code.",
    "SIGABRT": "The process aborted itself, often after an error in native code.",
}


class RunEnd:
    """Collect the traffic comparison of each rank and the exit report."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._differences: dict[int, tuple[int, int]] = {}
        self.outcome: str | None = None
        self._report: Mapping[str, Any] = {}
        self._resident_bytes: dict[int, int] = {}
        self._saved: int | None = None

    def add_checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._saved = item["step"]

    def add_gauge(self, item: GaugeItem) -> None:
        if "resident_bytes" in item:
            self._resident_bytes[item["rank"]] = item["resident_bytes"]

    def add_verdict(self, item: VerdictItem) -> None:
        calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in item["rows"])
        size = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in item["rows"])
        self._differences[item["rank"]] = size, calls

    def end(self, outcome: str, report: Mapping[str, Any] | None) -> None:
        self.outcome, self._report = outcome, report or {}

    @property
    def reason(self) -> str:
        """Return the reason in the exit report, or an empty text."""
        return strip_control_characters(str(self._report.get("reason") or ""))

    @property
    def difference(self) -> tuple[int, int] | None:
        """Return the traffic difference of all ranks in bytes and calls, None before the first report of a rank."""
        if not self._differences:
            return None
        sizes, calls = zip(*self._differences.values(), strict=True)
        return sum(sizes), sum(calls)

    @property
    def traffic_sentence(self) -> str:
        """Return 'Traffic matches the plan.' or the difference. Empty before the first report of a rank."""
        if self.difference is None:
            return ""
        num_reported, num_ranks = len(self._differences), self._run.world_size
        ranks = f" on {num_reported} of {num_ranks} ranks" if num_reported < num_ranks else ""
        if self.difference == (0, 0):
            return f"Traffic{ranks} matches the plan."
        return f"Traffic{ranks} differs by {format_difference(*self.difference)}."

    def make_findings(self) -> Iterator[RunFinding]:
        if self.outcome == "lost":
            yield self._make_lost_finding()
        elif self.outcome == "failed":
            yield self._make_failed_finding()
        elif self.difference not in (None, (0, 0)):
            yield self._make_mismatch_finding()

    def _make_lost_finding(self) -> RunFinding:
        what, _, more = self.reason.partition("; ")
        sentence = f"Lost: {what or 'the host reported no reason'}"
        where = self._run.members[0].host if len(self._run.members) == 1 else "the host"
        following = f"Check {where}, then retry the job."
        action: Action = "retry"
        if self._saved is not None and len(self._run.members) > 1:
            following = "Resume the job on a smaller layout, or retry the job when its hosts are back."
            action = "resume_smaller"
        facts = tuple(make_evidence(line) for line in self._get_log_lines())
        return RunFinding("failed", 2.0, make_sentence(sentence), make_sentence(more), following, facts, action)

    def _make_failed_finding(self) -> RunFinding:
        rank, reason = self._report.get("rank"), self.reason
        facts = tuple(make_evidence(line, [rank] if rank is not None else []) for line in self._get_log_lines())
        if len(reason) > MAX_REASON:
            facts = (make_evidence(reason), *facts)
        if rank is not None and (match := NOT_FINITE.search(reason)):
            return _make_diverged_finding(match, (make_evidence(reason, [rank]), *facts))
        memory = None if rank is None else parse_out_of_memory([reason, *(self._report.get("evidence") or ())])
        following, action = self._get_next_step(rank, reason, memory)
        message, cause = _split_reason(reason)
        if name := self._report.get("signal"):
            known = signal.Signals.__members__.get(name)
            named = f"signal {known.value} ({name})" if known is not None else name  # "signal 9 (SIGKILL)"
            message = message.replace(name, named, 1).removesuffix(" after step 0")
            cause = self._explain_signal(name)
            if name == "SIGKILL" and self._count_kernel_kills():
                message = f"{message}, because the kernel ran out of memory"
        elif first := self._report.get("first_error"):
            cause = f"{cause} It followed from {strip_control_characters(str(first))}".strip()
        place = ""
        if rank is not None and cause and (not name or "evidence" in self._report):
            place = _get_source_line(self._get_evidence_lines())
        if memory is not None and rank is not None:
            message = cut_after_request(message)
            cause = describe_request(memory) or cause
            known_facts = list_memory_facts(memory, self._run, rank, self._resident_bytes.get(rank))
            facts = (*(make_evidence(fact, [rank]) for fact in known_facts), *facts)
        if rank is not None:
            message = message.removeprefix(f"rank {rank} ")
            message = f"{self._run.format_rank(rank)}{' ' if name or not cause else ', '}{message}"
        elif not message:
            message = "the host reported no reason"
        message = message if len(message) <= MAX_REASON else f"{message[: MAX_REASON - 1]}…"
        sentence = make_sentence(f"Failed: {message.rstrip('.')}{f' ({place})' if place else ''}")
        return RunFinding("failed", 2.0, sentence, cause, following, facts, action, -1 if rank is None else rank)

    def _explain_signal(self, name: str) -> str:
        """Return the known cause of a signal as a sentence, or an empty text."""
        if name != "SIGKILL":
            error = strip_control_characters(str(self._report.get("error") or ""))
            return f"The library reports {make_sentence(f'`{error}`')}" if error else CAUSES.get(name, "")
        kill = self._report.get("kill") or {}
        if kill.get("oom_kills"):
            return str(kill["text"])
        if kill.get("oom_kills") == 0:
            return f"The cause of SIGKILL is unknown. {kill['text']}"
        return f"The cause of SIGKILL is unknown. {CAUSES[name]}"

    def _count_kernel_kills(self) -> int | None:
        """Return the number of out-of-memory kills by the kernel, None if it is unknown."""
        number = (self._report.get("kill") or {}).get("oom_kills")
        return number if isinstance(number, int) else None

    def _get_next_step(self, rank: int | None, reason: str, memory: OutOfMemory | None) -> tuple[str, Action]:
        """Return the next step as a sentence and as an action."""
        if rank is None:
            if HOST_STOPPED_REASON in reason:  # the log of a rank may hold these words too
                if self._saved is None:
                    return "Retry the job when its host is back.", "retry"
                return f"Retry the job when its host is back, to resume after step {self._saved}.", "retry"
            if self._get_log_lines() or self._report.get("exit_code") is not None:
                return "Read the log of the launcher.", "open_log"
            return "", ""
        kernel_kills = self._count_kernel_kills()
        if self._report.get("signal") == "SIGKILL" and not kernel_kills:
            host = f"host {name}" if (name := self._run.get_host(rank)) else "the host"
            if kernel_kills == 0:
                return f"Ask the users and check the batch system of {host} who ended the process.", "open_log"
            check = f"check the kernel log of {host} for out-of-memory kills with {KILLS_COMMAND}"
            return f"Read the log of rank {rank}, and {check}.", "open_log"
        if memory is not None and (suggestion := suggest_micro_batches(memory, self._run, rank)):
            return suggestion, "copy_job"
        if kernel_kills or memory is not None:
            if self._run.is_script:
                return "Reduce the batch size in the script, or run the script on more ranks.", "copy_job"
            return "Use a smaller micro-batch, or a layout that needs less memory per rank.", "copy_job"
        return f"Read the log of rank {rank}.", "open_log"

    def _make_mismatch_finding(self) -> RunFinding:
        assert self.difference is not None
        ranks = [rank for rank, difference in self._differences.items() if difference != (0, 0)]
        where = f"{len(ranks)} of {format_count(len(self._differences), 'rank')}"
        sentence = f"Traffic mismatch: {format_difference(*self.difference)} on {where}."
        reason = "The measured collectives differ from the predicted collectives."
        facts = (make_evidence(f"total traffic difference: {format_difference(*self.difference)}", ranks),)
        following = "Compare predicted and measured calls under Traffic check."
        return RunFinding("notice", 0.5, sentence, reason, following, facts)

    def _get_evidence_lines(self) -> list[str]:
        """Return the lines that show the error, or else the last lines of the log."""
        return list(self._report.get("evidence") or self._report.get("log_tail") or ())

    def _get_log_lines(self) -> list[str]:
        """Return the last lines of the evidence with more than marks."""
        lines = map(strip_control_characters, self._get_evidence_lines())
        return [line for line in lines if not MARKS.issuperset(line)][-LINES:]


def _make_diverged_finding(match: re.Match[str], facts: tuple[Evidence, ...]) -> RunFinding:
    """Return the finding of a run that ended itself, because the loss or the gradient norm was not finite."""
    clipped = match["clip"] != "off"
    clip = f"gradients are clipped to {match['clip']}" if clipped else "gradient clipping is off"
    reason = f"At this step, the learning rate is {match['rate']}, {clip}, and the precision is {match['precision']}."
    following = LOWER_RATE if clipped else "Lower the learning rate, or set gradient clipping."
    sentence = f"Diverged: {format_not_finite(match['what'])} at step {match['step']}."
    return RunFinding("failed", 2.0, sentence, reason, following, facts, "copy_job")


def _split_reason(reason: str) -> tuple[str, str]:
    """Split a reason into the error message, and a sentence about the exit code."""
    match = EXIT_CODE.match(reason)
    if match is None or not match["message"]:
        return reason, ""
    cause = "An uncaught exception ended the rank" if EXCEPTION.match(match["message"]) else "The rank ended"
    return match["message"], f"{cause} with exit code {match['code']}."


def _get_source_line(tail: Iterable[str]) -> str:
    """Return 'train.py:12', the innermost frame of the last traceback, in the user's code if possible."""
    frames = [
        (match["file"], match["line"]) for line in tail if (match := FRAME.search(strip_control_characters(line)))
    ]
    own = [frame for frame in frames if not any(part in frame[0] for part in LIBRARIES)]
    file, line = (own or frames or [("", "")])[-1]
    return f"{PurePosixPath(file).name}:{line}" if file else ""
