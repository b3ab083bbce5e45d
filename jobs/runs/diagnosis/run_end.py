"""Findings about the end of a run: the reason of a failure, and the traffic compared with the plan."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from contracts.control import HOST_STOPPED_REASON
from contracts.fields import strip_control_characters
from contracts.telemetry.results import VerdictItem
from contracts.telemetry.steps import CheckpointItem
from jobs.core.verdict_schema import Action, Evidence
from jobs.runs.diagnosis.findings import Finding, format_difference, make_evidence, make_sentence
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.training_health import LOWER_RATE, format_not_finite
from planner.facts.validation import format_count

LINES = 3  # log lines in the evidence
MAX_REASON = 200  # characters in the verdict: the evidence holds the full text
EXIT_CODE = re.compile(r"rank \d+ ended with exit code (?P<code>-?\d+): ?(?P<message>.*)", re.IGNORECASE)
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
MARKS = frozenset("^~ \t")  # Python marks the failing code with these
NOT_FINITE = re.compile(  # the error of a run that ended at a NaN or an infinite value, see workers/trainer/trainer.py
    r"(?P<what>(?:validation )?(?:loss|gradient norm) is [^;]+) at step (?P<step>\d+); "
    r"learning rate \S+ \((?P<rate>\S+) at this step\), gradient clip (?P<clip>\S+), precision (?P<precision>\S+)$"
)
CAUSES = {
    "SIGKILL": "The usual cause is the kernel's out-of-memory killer, or a user who killed the process.",
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
        self._saved: int | None = None

    def add_checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._saved = item["step"]

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
        return sum(size for size, _ in self._differences.values()), sum(
            calls for _, calls in self._differences.values()
        )

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

    def make_findings(self) -> Iterator[Finding]:
        if self.outcome == "lost":
            yield self._make_lost_finding()
        elif self.outcome == "failed":
            yield self._make_failed_finding()
        elif self.difference not in (None, (0, 0)):
            yield self._make_mismatch_finding()

    def _make_lost_finding(self) -> Finding:
        what, _, more = self.reason.partition("; ")
        sentence = f"Lost: {what or 'the host reported no reason'}"
        where = self._run.members[0].host if len(self._run.members) == 1 else "the host"
        following = f"Check {where}, then retry the job."
        action: Action = "retry"
        if self._saved is not None and len(self._run.members) > 1:
            following = "Resume the job on a smaller layout, or retry the job when its hosts are back."
            action = "resume_smaller"
        facts = tuple(make_evidence(line) for line in self._get_log_lines())
        return Finding("failed", 2.0, make_sentence(sentence), make_sentence(more), following, facts, action)

    def _make_failed_finding(self) -> Finding:
        rank, reason = self._report.get("rank"), self.reason
        facts = tuple(make_evidence(line, [rank] if rank is not None else []) for line in self._get_log_lines())
        if len(reason) > MAX_REASON:
            facts = (make_evidence(reason), *facts)
        if rank is not None and (match := NOT_FINITE.search(reason)):
            return _make_diverged_finding(match, (make_evidence(reason, [rank]), *facts))
        following, action = self._get_next_step(rank, reason)
        message, cause = _split_reason(reason)
        if name := self._report.get("signal"):
            message = message.replace(name, _format_signal(name), 1).removesuffix(" after step 0")
            cause = CAUSES.get(name, "")
        place = _get_source_line(self._report.get("log_tail") or ()) if rank is not None and cause and not name else ""
        if rank is not None:
            message = message.removeprefix(f"rank {rank} ")
            message = f"{self._run.format_rank(rank)}{' ' if name or not cause else ', '}{message}"
        elif not message:
            message = "the host reported no reason"
        sentence = make_sentence(f"Failed: {_truncate_reason(message).rstrip('.')}{f' ({place})' if place else ''}")
        return Finding("failed", 2.0, sentence, cause, following, facts, action, -1 if rank is None else rank)

    def _get_next_step(self, rank: int | None, reason: str) -> tuple[str, Action]:
        """Return the next step as a sentence and as an action."""
        if rank is None:
            if HOST_STOPPED_REASON in reason:  # the log of a rank may hold these words too
                if self._saved is None:
                    return "Retry the job when its host is back.", "retry"
                return f"Retry the job when its host is back, to resume after step {self._saved}.", "retry"
            if self._get_log_lines() or self._report.get("exit_code") is not None:
                return "Read the log of the launcher.", "open_log"
            return "", ""
        if self._report.get("signal") == "SIGKILL":
            name = self._run.get_host(rank)
            host = f"host {name}" if name else "the host"
            return (
                f"Read the log of rank {rank}, and check the kernel log of {host} for out-of-memory kills.",
                "open_log",
            )
        if OUT_OF_MEMORY.search(reason):
            if self._run.is_script:
                return "Reduce the batch size in the script, or run the script on more ranks.", "copy_job"
            return "Use a smaller micro-batch, or a layout that needs less memory per rank.", "copy_job"
        return f"Read the log of rank {rank}.", "open_log"

    def _make_mismatch_finding(self) -> Finding:
        assert self.difference is not None
        ranks = [rank for rank, difference in self._differences.items() if difference != (0, 0)]
        where = f"{len(ranks)} of {format_count(len(self._differences), 'rank')}"
        sentence = f"Traffic mismatch: {format_difference(*self.difference)} on {where}."
        reason = "The measured collectives differ from the predicted collectives."
        facts = (make_evidence(f"total traffic difference: {format_difference(*self.difference)}", ranks),)
        return Finding(
            "notice", 0.5, sentence, reason, "Compare predicted and measured calls under Traffic check.", facts
        )

    def _get_log_lines(self) -> list[str]:
        """Return the last log lines with more than marks."""
        lines = map(strip_control_characters, self._report.get("log_tail") or ())
        return [line for line in lines if not MARKS.issuperset(line)][-LINES:]


def _make_diverged_finding(match: re.Match[str], facts: tuple[Evidence, ...]) -> Finding:
    """Return the finding of a run that ended itself, because the loss or the gradient norm was not finite."""
    clipped = match["clip"] != "off"
    clip = f"gradients are clipped to {match['clip']}" if clipped else "gradient clipping is off"
    reason = f"At this step, the learning rate is {match['rate']}, {clip}, and the precision is {match['precision']}."
    following = LOWER_RATE if clipped else "Lower the learning rate, or set gradient clipping."
    sentence = f"Diverged: {format_not_finite(match['what'])} at step {match['step']}."
    return Finding("failed", 2.0, sentence, reason, following, facts, "copy_job")


def _format_signal(name: str) -> str:
    """Return 'signal 9 (SIGKILL)' for 'SIGKILL'."""
    known = signal.Signals.__members__.get(name)
    return f"signal {known.value} ({name})" if known is not None else name


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


def _truncate_reason(text: str) -> str:
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"
