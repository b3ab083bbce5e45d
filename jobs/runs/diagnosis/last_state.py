"""Explain a failure by the last state of the ranks: which rank was absent, and in which call and line others waited."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from contracts.telemetry.items import StallItem
from jobs.core.verdict_schema import Evidence
from jobs.runs.diagnosis.deadlocks import Positions, format_group, get_place, judge_difference, parse_group
from jobs.runs.diagnosis.findings import RunFinding, capitalize, format_ranks, make_evidence
from jobs.runs.diagnosis.hang_texts import (
    LEFT_NEXT,
    NEXT_STEPS,
    describe_calls,
    describe_stuck_ranks,
    get_mismatch_step,
)
from jobs.runs.diagnosis.hangs import FoundHang
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.traced_step import ProcessGroup

# Errors of a rank whose peers are the cause.
PEER_ERROR = re.compile(
    r"tim(ed|e)[ -]?out|connection (closed|reset)|broken pipe|collective mismatch|data size doesn't match", re.I
)
LOST_CONNECTION = re.compile(r"connection (closed|reset)|broken pipe", re.I)
SIZE_ERROR = re.compile(r"data size doesn't match expected size")
WEIGHT, EVIDENCE_WEIGHT = 2.5, 1.0  # above and below the finding of the exit report, which has 2


class AbsentRanks(NamedTuple):
    """Ranks that ended before a call in which another rank failed."""

    ranks: tuple[int, ...]
    failed: int
    group: ProcessGroup
    sequence: int
    call: str


def explain_failure(
    run: PlannedRun,
    report: Mapping[str, Any],
    found: FoundHang | None,
    positions: Positions,
    ended: Mapping[int, StallItem],
) -> Iterator[RunFinding]:
    """Yield at most one finding. It is the verdict if the first failed rank only lost its peers."""
    lines = [str(report.get("reason") or ""), *map(str, report.get("log_tail") or ())]
    is_peer_error = bool(report.get("lost_peer")) or any(PEER_ERROR.search(line) for line in lines)
    weight = WEIGHT if is_peer_error else EVIDENCE_WEIGHT
    sides = tuple(
        make_evidence(f"{format_ranks([rank])}: {describe_end(item)}", [rank])
        for rank, item in sorted(ended.items())
        if describe_end(item)
    )
    if (difference := positions.find_difference(ended)) is not None:
        group, sequence, calls = difference
        _, odd = judge_difference(positions, group, sequence, calls)
        text = describe_calls(group, sequence, calls, odd)
        facts = found.evidence if found is not None else sides
        following = get_mismatch_step(calls)
        yield _make_finding(f"Failed: {text[:1].lower()}{text[1:]}", "", following, facts, odd, weight)
    elif found is not None:
        stuck = describe_stuck_ranks(found.blame.cause, found.blame.ranks, found.deadlock, run, found.waiting)
        stuck = re.sub(r"\bwaits? for\b", "waited for", stuck, count=1)
        following = found.blame.following or "Read the Python stack of the rank in the evidence."
        yield _make_finding(
            f"Failed: {stuck}.", found.blame.reason, following, found.evidence, found.blame.ranks, weight
        )
    elif (absent := find_absent_ranks(positions, ended)) is not None:
        who = format_ranks(absent.ranks)
        op = absent.call.partition(" ")[0]
        call = f"{op} {absent.sequence:,} on {format_group(absent.group)} ({format_ranks(absent.group.ranks)})"
        sentence = f"Failed: {format_ranks([absent.failed])} waited for {who}, which did not enter {call}."
        error = ended[absent.ranks[0]].get("ended", "")
        how = f"with {error.splitlines()[0].rstrip('.')}" if error else "without an error"
        reason = f"{capitalize(who)} ended {how}."
        yield _make_finding(sentence, reason, LEFT_NEXT if not error else "", sides, absent.ranks, weight)
    elif any(SIZE_ERROR.search(line) for line in lines) and sides:
        rank = report.get("rank")
        who = "a rank" if rank is None else format_ranks([rank])
        sentence = f"Failed: {who} used another size in a collective than its peers."
        reason = "The communication library received more bytes than the rank expected."
        yield _make_finding(sentence, reason, NEXT_STEPS["mismatch"], sides, () if rank is None else (rank,), weight)
    elif (lost := find_lost_call(ended, report)) is not None:
        call, silent = lost
        sentence = f"Failed: {format_ranks([report['rank']])} lost its connection in {call}."
        verb = "has" if len(silent) == 1 else "have"
        reason = f"{capitalize(format_ranks(silent))} {verb} sent no last report, so the process ended abruptly."
        yield _make_finding(sentence, reason, f"Read the log of {format_ranks(silent)}.", sides, silent, weight)
    elif sides:
        yield RunFinding("failed", EVIDENCE_WEIGHT, "Failed: the last state of the ranks is known.", "", "", sides)


def find_absent_ranks(positions: Positions, ended: Mapping[int, StallItem]) -> AbsentRanks | None:
    """Find ranks that ended before a call in which a rank failed."""
    for rank, item in sorted(ended.items()):
        if not item.get("ended"):
            continue
        for progress in item["groups"]:
            group, sequence = parse_group(progress), progress["issued"]
            absent = tuple(r for r in group.ranks if r in ended and not positions.has_issued(r, group, sequence))
            if absent and sequence:
                call = (progress.get("recent") or ["collective"])[-1]
                return AbsentRanks(absent, rank, group, sequence, call)
    return None


def find_lost_call(ended: Mapping[int, StallItem], report: Mapping[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """Return the call in which the first failed rank lost a peer, and the ranks of the group without a last report."""
    item = ended.get(report.get("rank", -1))
    if item is None or not LOST_CONNECTION.search(item.get("ended", "")):
        return None
    for progress in item["groups"]:
        group = parse_group(progress)
        silent = tuple(rank for rank in group.ranks if rank not in ended)
        if silent and progress.get("recent"):
            op = progress["recent"][-1].partition(" ")[0]
            call = f"{op} {progress['issued']:,} on {format_group(group)} ({format_ranks(group.ranks)})"
            return call, silent
    return None


def describe_end(item: StallItem) -> str:
    """Return "last called all_reduce of 64 float32 (call 66 on world), at train.py:12: `loss.backward()`"."""
    called = [progress for progress in item["groups"] if progress.get("recent")]
    place, source = get_place(item["stack"]), item.get("source", "")
    at = f"ended at {place}{f': `{source}`' if source else ''}" if place else ""
    calls = [
        f"last called {one['recent'][-1]} (call {one['issued']:,} on {format_group(parse_group(one))})"
        for one in called[:3]
    ]
    return ", ".join(filter(None, [*calls, at]))


def _make_finding(
    sentence: str, reason: str, following: str, facts: tuple[Evidence, ...], ranks: tuple[int, ...], weight: float
) -> RunFinding:
    return RunFinding("failed", weight, sentence, reason, following, facts, "open_log", min(ranks, default=-1))
