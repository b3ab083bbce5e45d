"""How a run ended: its traffic beside the plan, as its ranks compared it, and why it failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from contracts.control import STOPPED
from contracts.plain import plain_line
from contracts.telemetry.results import VerdictItem
from contracts.telemetry.steps import CheckpointItem
from jobs.diagnosis.findings import Finding, apart_words, evidence
from jobs.diagnosis.run import Run

LINES = 3  # of the log, that are evidence
LONG = 200  # characters: of a longer reason the verdict has the beginning, and its evidence the whole
MARKS = frozenset("^~ \t")  # what Python writes below a line of code


class Ending:
    """What verdicts and the exit report say."""

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
        """Of its end, as it was told; empty where nobody did."""
        return plain_line(str(self._report.get("reason") or ""))

    @property
    def apart(self) -> tuple[int, int] | None:
        """Bytes and calls that all ranks together differ by from the plan; None until one told."""
        if not self._apart:
            return None
        return sum(size for size, _ in self._apart.values()), sum(calls for _, calls in self._apart.values())

    @property
    def apart_words(self) -> str:
        """'0 B, 0 calls', and of how many ranks where some have not told; empty until one told."""
        if self.apart is None:
            return ""
        told, ranks = len(self._apart), self._run.world_size
        return apart_words(*self.apart) + (f" on the {told} of {ranks} ranks that told" if told < ranks else "")

    def findings(self) -> Iterator[Finding]:
        if self.outcome in ("failed", "lost"):
            yield self._failed()
        elif self.apart not in (None, (0, 0)):
            yield self._other_traffic()

    def _failed(self) -> Finding:
        rank, signal = self._report.get("rank"), self._report.get("signal")
        reason = self.reason or "nobody told why"
        lines = _telling(self._report.get("log_tail") or ())[-LINES:]
        facts = tuple(evidence(line, [rank] if rank is not None else []) for line in lines)
        if self.outcome == "lost":
            # Not more than was told: a host may well be there whose supervisor died.
            what, _, more = reason.partition("; ")
            return Finding("failed", 2.0, f"Lost: {what}", more, "look at the host; run it again", facts)
        who = f"{self._run.where(rank)} failed first" if rank is not None else "Failed"
        following = "look at the launcher's log" if lines or self._report.get("exit_code") is not None else ""
        if rank is not None:
            following = "look at that rank's log"
        if signal == "SIGKILL":
            following = "look at the host's memory: the kernel or somebody killed it"
        if rank is None and STOPPED in reason:  # a rank may print the same words
            following = self._again()
        if len(reason) > LONG:
            facts, reason = (evidence(reason), *facts), f"{reason[: LONG - 1]}…"
        return Finding("failed", 2.0, who[0].upper() + who[1:], reason, following, facts)

    def _again(self) -> str:
        again = "try it again (meshboard retry) once its host is back"
        if self._saved is None:
            return f"{again}: nothing of its own failed"
        return f"{again}: it goes on from its checkpoint after step {self._saved}"

    def _other_traffic(self) -> Finding:
        assert self.apart is not None
        size, calls = self.apart
        ranks = [rank for rank, apart in self._apart.items() if apart != (0, 0)]
        text = f"{len(ranks)} of {len(self._apart)} ranks sent other than predicted: {apart_words(size, calls)}"
        sentence = f"Not as planned: {apart_words(size, calls)} apart"
        return Finding("notice", 0.5, sentence, text, "see predicted beside measured", (evidence(text, ranks),))


def _telling(tail: Iterable[str]) -> list[str]:
    """Of the log's last lines those that say something."""
    return [line for line in map(plain_line, tail) if not MARKS.issuperset(line)]
