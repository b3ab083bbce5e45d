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
from jobs.runs.diagnosis.course.training import LOWER_RATE, not_finite_words
from jobs.runs.diagnosis.findings import Finding, apart_words, evidence, full_sentence
from jobs.runs.diagnosis.run import Run
from planner.facts.validation import format_count

LINES = 3  # log lines in the evidence
MAX_REASON = 200  # characters in the verdict: the evidence holds the full text
EXIT_CODE = re.compile(r"rank \d+ ended with exit code (?P<code>-?\d+): ?(?P<message>.*)", re.IGNORECASE)
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
MARKS = frozenset("^~ \t")  # Python marks the failing part of a line of code with these
NOT_FINITE = re.compile(  # the error of a run that ended at a NaN or an infinite value, see workers/trainer/trainer.py
    r"(?P<what>(?:validation )?(?:loss|gradient norm) is [^;]+) at step (?P<step>\d+); "
    r"learning rate \S+ \((?P<rate>\S+) at this step\), gradient clip (?P<clip>\S+), precision (?P<precision>\S+)$"
)
CAUSES = {
    "SIGKILL": "The usual cause is the kernel's out-of-memory killer, or a user who killed the process.",
    "SIGSEGV": "The process accessed invalid memory, often in native code.",
    "SIGABRT": "The process aborted itself, often after an error in native code.",
}


class Ending:
    """Collects the traffic comparison of each rank, and the exit report."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._apart: dict[int, tuple[int, int]] = {}
        self.outcome: str | None = None
        self._report: Mapping[str, Any] = {}
        self._saved: int | None = None

    def saved(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._saved = item["step"]

    def verdict(self, item: VerdictItem) -> None:
        calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in item["rows"])
        size = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in item["rows"])
        self._apart[item["rank"]] = size, calls

    def ended(self, outcome: str, report: Mapping[str, Any] | None) -> None:
        self.outcome, self._report = outcome, report or {}

    @property
    def reason(self) -> str:
        """Return the reason in the exit report, or an empty text."""
        return strip_control_characters(str(self._report.get("reason") or ""))

    @property
    def apart(self) -> tuple[int, int] | None:
        """Return the traffic difference of all ranks in bytes and calls, None before the first report of a rank."""
        if not self._apart:
            return None
        return sum(size for size, _ in self._apart.values()), sum(calls for _, calls in self._apart.values())

    @property
    def traffic_words(self) -> str:
        """Return 'Traffic matches the plan.' or the difference. Empty before the first report of a rank."""
        if self.apart is None:
            return ""
        num_reported, num_ranks = len(self._apart), self._run.world_size
        ranks = f" on {num_reported} of {num_ranks} ranks" if num_reported < num_ranks else ""
        if self.apart == (0, 0):
            return f"Traffic{ranks} matches the plan."
        return f"Traffic{ranks} differs by {apart_words(*self.apart)}."

    def findings(self) -> Iterator[Finding]:
        if self.outcome == "lost":
            yield self._lost()
        elif self.outcome == "failed":
            yield self._failed()
        elif self.apart not in (None, (0, 0)):
            yield self._mismatch()

    def _lost(self) -> Finding:
        what, _, more = self.reason.partition("; ")
        sentence = f"Lost: {what or 'the host reported no reason'}"
        where = self._run.members[0].host if len(self._run.members) == 1 else "the host"
        following = f"Check {where}, then retry the job."
        action: Action = "retry"
        if self._saved is not None and len(self._run.members) > 1:
            following = "Resume the job on a smaller layout, or retry the job when its hosts are back."
            action = "resume_smaller"
        facts = tuple(evidence(line) for line in self._log_lines())
        return Finding("failed", 2.0, full_sentence(sentence), full_sentence(more), following, facts, action)

    def _failed(self) -> Finding:
        rank, reason = self._report.get("rank"), self.reason
        facts = tuple(evidence(line, [rank] if rank is not None else []) for line in self._log_lines())
        if len(reason) > MAX_REASON:
            facts = (evidence(reason), *facts)
        if rank is not None and (found := NOT_FINITE.search(reason)):
            return _diverged(found, (evidence(reason, [rank]), *facts))
        following, action = self._after_failure(rank, reason)
        message, why = _message(reason)
        if name := self._report.get("signal"):
            message = message.replace(name, _signal_words(name), 1).removesuffix(" after step 0")
            why = CAUSES.get(name, "")
        place = _source_line(self._report.get("log_tail") or ()) if rank is not None and why and not name else ""
        if rank is not None:
            message = message.removeprefix(f"rank {rank} ")
            message = f"{self._run.where(rank)}{' ' if name or not why else ', '}{message}"
        elif not message:
            message = "the host reported no reason"
        sentence = full_sentence(f"Failed: {_shortened(message).rstrip('.')}{f' ({place})' if place else ''}")
        return Finding("failed", 2.0, sentence, why, following, facts, action, -1 if rank is None else rank)

    def _after_failure(self, rank: int | None, reason: str) -> tuple[str, Action]:
        """Return the next step as a sentence and as an action."""
        if rank is None:
            if HOST_STOPPED_REASON in reason:  # the log of a rank may hold these words too
                if self._saved is None:
                    return "Retry the job when its host is back.", "retry"
                return f"Retry the job when its host is back, to resume after step {self._saved}.", "retry"
            if self._log_lines() or self._report.get("exit_code") is not None:
                return "Read the log of the launcher.", "open_log"
            return "", ""
        if self._report.get("signal") == "SIGKILL":
            name = self._run.host_of(rank)
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

    def _mismatch(self) -> Finding:
        assert self.apart is not None
        ranks = [rank for rank, apart in self._apart.items() if apart != (0, 0)]
        where = f"{len(ranks)} of {format_count(len(self._apart), 'rank')}"
        sentence = f"Traffic mismatch: {apart_words(*self.apart)} on {where}."
        reason = "The measured collectives differ from the predicted collectives."
        facts = (evidence(f"total traffic difference: {apart_words(*self.apart)}", ranks),)
        return Finding(
            "notice", 0.5, sentence, reason, "Compare predicted and measured calls under Traffic check.", facts
        )

    def _log_lines(self) -> list[str]:
        """Return the last log lines that hold more than marks."""
        lines = map(strip_control_characters, self._report.get("log_tail") or ())
        return [line for line in lines if not MARKS.issuperset(line)][-LINES:]


def _diverged(found: re.Match[str], facts: tuple[Evidence, ...]) -> Finding:
    """Return the finding of a run that ended itself, because the loss or the gradient norm was not finite."""
    clipped = found["clip"] != "off"
    clip = f"gradients are clipped to {found['clip']}" if clipped else "gradient clipping is off"
    reason = f"At this step, the learning rate is {found['rate']}, {clip}, and the precision is {found['precision']}."
    following = LOWER_RATE if clipped else "Lower the learning rate, or set gradient clipping."
    sentence = f"Diverged: {not_finite_words(found['what'])} at step {found['step']}."
    return Finding("failed", 2.0, sentence, reason, following, facts, "copy_job")


def _signal_words(name: str) -> str:
    """Return 'signal 9 (SIGKILL)' for 'SIGKILL'."""
    known = signal.Signals.__members__.get(name)
    return f"signal {known.value} ({name})" if known is not None else name


def _message(reason: str) -> tuple[str, str]:
    """Split a reason into the error message, and a sentence about the exit code."""
    match = EXIT_CODE.match(reason)
    if match is None or not match["message"]:
        return reason, ""
    cause = "An uncaught exception ended the rank" if EXCEPTION.match(match["message"]) else "The rank ended"
    return match["message"], f"{cause} with exit code {match['code']}."


def _source_line(tail: Iterable[str]) -> str:
    """Return 'train.py:12', the innermost frame of the last traceback, in the user's code if possible."""
    frames = [
        (match["file"], match["line"]) for line in tail if (match := FRAME.search(strip_control_characters(line)))
    ]
    own = [frame for frame in frames if not any(part in frame[0] for part in LIBRARIES)]
    file, line = (own or frames or [("", "")])[-1]
    return f"{PurePosixPath(file).name}:{line}" if file else ""


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"
