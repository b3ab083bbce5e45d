"""How an attempt ended, in one sentence and one checked report."""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from typing import NamedTuple

from contracts.codec import MAX_EXIT_REPORT_BYTES, BadMessageError, validate_exit_report
from contracts.control import VERSION, ExitReport, LaunchOrder, Outcome
from contracts.fields import ESCAPES, strip_control_characters
from planner.facts.validation import format_count
from workers.host.attempts import AttemptDir
from workers.host.files import BadFileError, read_json
from workers.host.start.programs import program_of
from workers.host.supervisor.tail import LAUNCHER, LogTail
from workers.host.supervisor.tally import Tally

log = logging.getLogger(__name__)

SIGNAL = re.compile(r"SIG[A-Z0-9]{1,12}|signal [0-9]{1,3}")


class Failure(NamedTuple):
    """The rank that failed first, as the launcher wrote it down."""

    rank: int
    exit_code: int
    signal: str | None
    message: str
    time: float | None = None  # by this host's clock
    lost_peer: bool = False


def read_failure(attempt: AttemptDir, ranks: range) -> Failure | None:
    """None when torchrun named none, or its file makes no sense: it lies where the job can write."""
    try:
        told = read_json(attempt.failure)
    except (BadFileError, OSError) as error:
        log.warning("ignored the failure report of the launcher: %s", error)
        return None
    if not isinstance(told, dict):
        return None
    rank, code, killed_by = told.get("rank"), told.get("exit_code"), told.get("signal")
    if not (type(rank) is int and rank in ranks and type(code) is int and abs(code) < 2**31):
        return None
    if killed_by is not None and not (isinstance(killed_by, str) and SIGNAL.fullmatch(killed_by)):
        return None
    time_s, message = told.get("time"), plain(str(told.get("message") or ""))
    when = float(time_s) if isinstance(time_s, int | float) and 0 < time_s < 2**40 else None
    return Failure(rank, code, killed_by, message, when, told.get("lost_peer") is True)


def plain(text: str) -> str:
    """One line that any reader can hold: no colours, no NUL, no half characters, at most 500 long."""
    whole = " ".join(ESCAPES.sub("", text).replace("\0", "\ufffd").encode("utf-8", "replace").decode().split())
    return strip_control_characters(whole)[:500]


class Ended(NamedTuple):
    """What is known when torchrun is gone."""

    code: int  # -N: signal N
    failure: Failure | None
    ended_by: Outcome | None  # set when the supervisor, not the training, ended it
    reason: str
    started: float  # by this host's clock
    offset_s: float = 0.0  # of the board's clock over this host's
    preempted: bool = False


def exit_report(attempt: AttemptDir, order: LaunchOrder, ended: Ended, tally: Tally, tail: LogTail) -> ExitReport:
    """Always one that every reader takes."""
    failure = ended.failure
    outcome, reason = _verdict(order, ended, tally, tail)
    rank = None if failure is None else failure.rank
    report = ExitReport(
        v=VERSION,
        job=attempt.job,
        attempt=attempt.attempt,
        outcome=outcome,
        reason=reason[:1000],
        exit_code=ended.code if failure is None else failure.exit_code,
        rank=rank,
        signal=_signal_name(ended.code) if failure is None else failure.signal,
        log_tail=tail.last_lines(LAUNCHER if rank is None else rank) if outcome == "failed" else [],
        started=ended.started + ended.offset_s,
        finished=time.time() + ended.offset_s,
        summary=tally.summary(),
    )
    if failure is not None and outcome == "failed":
        if failure.time is not None:
            report["failed_at"] = failure.time + ended.offset_s
        report["lost_peer"] = failure.lost_peer
    if ended.preempted:
        report["preempted"] = True
    trouble = _trouble(report)
    if trouble:
        log.error("exit report without summary: %s", trouble)
        report["summary"], report["log_tail"] = None, []
        report["reason"] = f"{report['reason'][:600]} (the summary of the ranks is missing: {trouble[:300]})"
    return report


def steps_of(order: LaunchOrder) -> int:
    """How many a training run is to make; 0 of what makes none."""
    return int(order["spec"].get("train", {}).get("steps", 0))


def saved_words(tally: Tally, why: str) -> str:
    """Of a run that saved and stopped because it was asked to."""
    newest = f"newest checkpoint {tally.checkpoint}" if tally.checkpoint else "no checkpoint was written"
    return f"stopped after step {tally.steps} {why}; {newest}"


def _trouble(report: ExitReport) -> str:
    """Why a reader would refuse it; empty when none would."""
    try:
        validate_exit_report(report)
    except BadMessageError as error:
        return str(error)
    size = len(json.dumps(report))
    return f"{size:,} bytes, more than the limit of {MAX_EXIT_REPORT_BYTES:,}" if size > MAX_EXIT_REPORT_BYTES else ""


def _verdict(order: LaunchOrder, ended: Ended, tally: Tally, tail: LogTail) -> tuple[Outcome, str]:
    if ended.ended_by is not None:
        return ended.ended_by, ended.reason
    if ended.code == 0:
        good_end = program_of(order).good_end
        if "{steps}" in good_end and not tally.steps:
            return "succeeded", "finished; this attempt reported no steps"  # the one before did them all
        return "succeeded", good_end.format(steps=tally.steps, tried=format_count(tally.tried, "rank"))
    failure = ended.failure
    if failure is None:
        killed_by = _signal_name(ended.code)
        how = f"was killed by {killed_by}" if killed_by else f"ended with exit code {ended.code}"
        return "failed", f"torchrun {how}{_after_step(tally)}"
    if failure.signal:
        return "failed", f"rank {failure.rank} was killed by {failure.signal}{_after_step(tally)}"
    said = failure.message or plain(tail.last_error(failure.rank))[:300]
    return "failed", f"rank {failure.rank} ended with exit code {failure.exit_code}: {said}"


def _after_step(tally: Tally) -> str:
    """Return ' after step 7', or an empty text before the first step and for a script without counted steps."""
    return f" after step {tally.steps}" if tally.steps else ""


def _signal_name(code: int) -> str | None:
    if code >= 0:
        return None
    return signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
