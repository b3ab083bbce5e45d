"""Find hangs and mismatches in flight recorder dumps: who waits for whom, in which call and line, per process group.

The analysis is that of running jobs. A call is pending if its state says so, or if a rank with a dump has not entered
it. Gloo records no states, so a pending call of a gloo dump is one that not all ranks have entered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast
from zlib import crc32

from contracts.telemetry.items import GroupProgress, StallItem
from jobs.core.verdict_schema import Cause, Evidence
from jobs.runs.diagnosis.deadlocks import (
    BlockedRank,
    Deadlock,
    Positions,
    find_deadlock,
    format_group,
    get_place,
    judge_difference,
)
from jobs.runs.diagnosis.findings import RunFinding, capitalize, format_ranks, make_evidence, truncate
from jobs.runs.diagnosis.hang_texts import NEXT_STEPS, conjugate, describe_calls, describe_side, describe_stuck_ranks
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.traced_step import POINT_TO_POINT, ProcessGroup
from jobs.runs.traces.imports.common import RecordedCall, Recording

MAX_FINDINGS = 20
UNKNOWN_CALL = 2**53  # above the number of any call
MAX_SIDES = 12
MAX_CALL_CHARACTERS = 120
NO_DUMP_NEXT = "Import the dumps of all ranks. A process that ended before the timeout writes no dump."
LAST_CALL_NEXT = "Read the code after the last recorded call of the rank."


class _RankCalls(NamedTuple):
    """Hold the calls of a rank in one group: collectives by sequence number, and messages by direction."""

    collectives: dict[int, list[RecordedCall]]
    messages: dict[tuple[int, int], list[RecordedCall]]  # (sender, receiver)


class RecordedRun:
    """Hold the calls of all ranks, by rank and process group."""

    def __init__(self, recordings: list[Recording]) -> None:
        self.recordings = {recording.rank: recording for recording in recordings}
        groups = _find_groups(recordings)
        self.calls: dict[int, dict[ProcessGroup, _RankCalls]] = {}
        for recording in recordings:
            own: dict[ProcessGroup, _RankCalls] = {}
            for call in recording.calls:
                rank_calls = own.setdefault(groups[call.group, call.ranks], _RankCalls({}, defaultdict(list)))
                if call.op not in POINT_TO_POINT:
                    rank_calls.collectives.setdefault(call.sequence, []).append(call)
                elif call.peer >= 0:
                    pair = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
                    rank_calls.messages[pair].append(call)
            self.calls[recording.rank] = own
        self.groups = sorted(set(groups.values()))
        ranks, self.members = set(self.recordings), dict[ProcessGroup, tuple[int, ...]]()
        self._issued: dict[tuple[int, ProcessGroup], int] = {}
        for group in self.groups:
            ranks.update(group.ranks)
            users = {rank for rank, own in self.calls.items() if group in own}  # also if the dump does not list them
            self.members[group] = tuple(sorted(users | (self.recordings.keys() & set(group.ranks))))
            self._issued |= {(rank, group): self._find_issued(rank, group) for rank in self.members[group]}
        self.world_size = 1 + max(ranks)
        self.without_dump = frozenset(ranks - set(self.recordings))

    def _find_issued(self, rank: int, group: ProcessGroup) -> int:
        own = self.calls[rank].get(group)
        if own is not None and own.collectives:
            return max(own.collectives)
        return 0 if self.recordings[rank].is_complete else UNKNOWN_CALL

    def get_issued(self, rank: int, group: ProcessGroup) -> int:
        """Return the number of the last call. A rank whose calls are unknown counts as having entered all calls."""
        return self._issued.get((rank, group), UNKNOWN_CALL)

    def get_call(self, rank: int, group: ProcessGroup, sequence: int) -> RecordedCall | None:
        own = self.calls.get(rank, {}).get(group)
        return own.collectives.get(sequence, [None])[-1] if own is not None else None

    def get_last(self, rank: int) -> tuple[RecordedCall, ProcessGroup] | None:
        """Return the last call of a rank."""
        calls = [
            (call, group)
            for group, own in self.calls.get(rank, {}).items()
            for call in [*own.collectives.get(self.get_issued(rank, group), []), *_list_last(own.messages.values())]
        ]
        return max(calls, key=lambda one: one[0].issued, default=None)


def _list_last(messages: Iterable[list[RecordedCall]]) -> list[RecordedCall]:
    return [calls[-1] for calls in messages]


def _find_groups(recordings: list[Recording]) -> dict[tuple[str, tuple[int, ...]], ProcessGroup]:
    """Return the group by its name and recorded ranks. Groups of unknown ranks get all ranks that use them."""
    users: dict[tuple[str, tuple[int, ...], str], set[int]] = defaultdict(set)
    for recording in recordings:
        for name, ranks, axis in {(call.group, call.ranks, call.axis) for call in recording.calls}:
            users[name, ranks, axis].add(recording.rank)
    everyone = tuple(sorted(recording.rank for recording in recordings))
    groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
    numbers: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for (name, ranks, axis), found in sorted(users.items()):
        members = ranks or (everyone if axis == "world" else tuple(sorted(found)))
        if (name, ranks) not in groups:
            groups[name, ranks] = ProcessGroup(axis, members, numbers[axis, members])
            numbers[axis, members] += 1
    return groups


def find_recorded_hangs(recordings: list[Recording]) -> list[RunFinding]:
    """Return what the dumps show, the cause first: at most MAX_FINDINGS findings."""
    if not any(recording.calls for recording in recordings):
        return []
    run = RecordedRun(recordings)
    positions = _RecordedPositions(run)
    standing = _find_standing(run)
    differences = sorted(_find_differences(run, positions), key=lambda one: one[0])
    findings = [finding for _, finding in differences]
    findings += _find_size_problems(run)
    if not differences and (deadlock := _find_deadlock(run, standing, positions)) is not None:
        index = len(findings) if deadlock.kind == "transfer" else 0  # wrong sizes explain a transfer that stalls
        findings.insert(index, _describe_deadlock(run, deadlock, standing))
    findings += _find_absent_ranks(run, findings)
    if not findings and not run.without_dump:
        ranks = capitalize(format_ranks(run.recordings))
        sentence = f"No hang found: all recorded calls of {ranks[:1].lower()}{ranks[1:]} agree and are complete."
        findings.append(RunFinding("well", 0.0, sentence, "", ""))
    return findings[:MAX_FINDINGS]


class _RecordedPositions(Positions):
    """Positions of ranks in dumps. A rank without a dump counts as having entered all calls."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run.world_size)
        self._run = run
        for rank, groups in run.calls.items():
            recent = {
                group: {number: _join_texts(calls) for number, calls in own.collectives.items()}
                for group, own in groups.items()
                if own.collectives
            }
            self.set_calls(rank, {}, recent)

    def has_issued(self, rank: int, group: ProcessGroup, sequence: int) -> bool:
        return self._run.get_issued(rank, group) >= sequence


def _join_texts(calls: list[RecordedCall]) -> str:
    """Return the text of one call. Coalesced operations have one number."""
    texts = [call.text for call in calls if call.op != "coalesced"] or ["coalesced"]
    joined = texts[0] if len(texts) == 1 else f"coalesced {', '.join(texts)}"
    if len(joined) <= MAX_CALL_CHARACTERS:
        return joined
    return f"coalesced {texts[0]} and {len(texts) - 1} more ({crc32(joined.encode()):08x})"


def _find_pending(run: RecordedRun, rank: int, group: ProcessGroup) -> RecordedCall | None:
    """Return the oldest operation of a group in flight. Started operations go first."""
    own = run.calls[rank].get(group)
    if own is None:
        return None
    fewest = min(run.get_issued(other, group) for other in run.members[group])
    pending = [calls[-1] for number, calls in own.collectives.items() if number > fewest or calls[-1].is_done is False]
    pending += [call for calls in own.messages.values() for call in calls if call.is_done is False]
    return min(pending, key=lambda call: (not call.has_started, call.issued), default=None)


def _find_standing(run: RecordedRun) -> dict[int, StallItem]:
    """Return the ranks with operations in flight, as if they had reported a stall."""
    standing = {}
    for rank, own in run.calls.items():
        pending = {group: call for group in own if (call := _find_pending(run, rank, group)) is not None}
        if not pending:
            continue
        first = min(pending.values(), key=lambda call: (not call.has_started, call.issued))
        item = {
            "kind": "standing",
            "rank": rank,
            "time": first.issued,
            "step": 0,
            "phase": "train",
            "still": 0.0,
            "stack": list(first.stack),
            "groups": [_make_progress(run, *one, first) for one in pending.items()],
        }
        standing[rank] = cast(StallItem, item)
    return standing


def _make_progress(run: RecordedRun, group: ProcessGroup, call: RecordedCall, first: RecordedCall) -> GroupProgress:
    progress: dict[str, Any] = {
        "group": {"axis": group.axis, "ranks": list(group.ranks), "nth": group.nth},
        "issued": run.get_issued(call.rank, group),
        "ended": max(0, call.sequence - 1),
        "op": call.op,
        "call": call.text,
        "since": call.issued,
        "sequence": call.sequence,
        "blocking": call is first,
    }
    if call.op in POINT_TO_POINT:
        progress["peer"] = call.peer
    return cast(GroupProgress, progress)


def _find_differences(run: RecordedRun, positions: Positions) -> Iterator[tuple[float, RunFinding]]:
    """Yield the first different call of each group, with its time."""
    for group, sequence, calls in positions.find_differences(sorted(run.recordings)):
        kind, odd = judge_difference(positions, group, sequence, calls)
        text = describe_calls(group, sequence, calls, odd)
        cause, reason = "mismatch", "The operation or size of the collective differs between ranks."
        if kind == "skipped":
            who = capitalize(format_ranks(odd))
            cause = "skipped call"
            reason = f"{who} skipped a collective, called an extra one, or calls them in another order."
        sides = _list_call_sides(run, group, sequence, calls)
        recorded = [call for rank in calls if (call := run.get_call(rank, group, sequence)) is not None]
        finding = _make_finding(
            f"Traffic mismatch: {text[:1].lower()}{text[1:]}", reason, NEXT_STEPS[cause], sides, odd
        )
        yield min((call.issued for call in recorded), default=0.0), finding
    yield from _find_message_differences(run)
    yield from _find_uneven_exchanges(run)


def _list_call_sides(run: RecordedRun, group: ProcessGroup, sequence: int, calls: Mapping[int, str]) -> list[Evidence]:
    """Return "ranks 0 and 2: all_reduce of 64 float32, at train.py:12 in step" for each different call and line."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(calls.items()):
        by_text[f"{text}{_format_place(run.get_call(rank, group, sequence))}"].append(rank)
    return [make_evidence(f"{format_ranks(ranks)}: {text}", ranks) for text, ranks in by_text.items()]


def _format_place(call: RecordedCall | None) -> str:
    place = get_place(call.stack) if call is not None else ""
    return f", at {place}" if place else ""


def _find_message_differences(run: RecordedRun) -> Iterator[tuple[float, RunFinding]]:
    """Yield the first message of each pair of ranks whose send and receive have different sizes or types."""
    for group in run.groups:
        pairs = sorted({pair for own in run.calls.values() if group in own for pair in own[group].messages})
        for sender, receiver in pairs:
            if not all(rank in run.recordings and run.recordings[rank].is_complete for rank in (sender, receiver)):
                continue
            sides = [run.calls[rank].get(group, _RankCalls({}, {})) for rank in (sender, receiver)]
            sent, received = (one.messages.get((sender, receiver), []) for one in sides)
            for number, (send, receive) in enumerate(zip(sent, received, strict=False), start=1):
                if send.text.partition(" ")[2] == receive.text.partition(" ")[2]:
                    continue
                sentence = (
                    f"Traffic mismatch: in message {number:,} from rank {sender} to rank {receiver} on "
                    f"{format_group(group)}, rank {sender} calls {send.text}, but rank {receiver} calls {receive.text}."
                )
                facts = [
                    make_evidence(f"rank {one.rank}: {one.text}{_format_place(one)}", [one.rank])
                    for one in (send, receive)
                ]
                reason = "The size of the message differs between the ranks."
                yield send.issued, _make_finding(sentence, reason, NEXT_STEPS["mismatch"], facts, (receiver,))
                break


def _find_uneven_exchanges(run: RecordedRun) -> Iterator[tuple[float, RunFinding]]:
    """Yield the first all-to-all of each group in which the ranks send and receive different totals."""
    for group in run.groups:
        own = [run.calls[rank][group].collectives for rank in run.members[group] if group in run.calls[rank]]
        if len(own) < len(group.ranks):
            continue
        for number in sorted(set.intersection(*(set(one) for one in own))):
            calls = [one[number][-1] for one in own]
            sizes = [(call.num_inputs, call.num_outputs) for call in calls]
            if any(None in size for size in sizes):
                continue
            sent, received = (sum(size[side] or 0 for size in sizes) for side in (0, 1))
            if sent != received:
                sentence = (
                    f"Traffic mismatch: in all_to_all {number:,} on {format_group(group)}, the ranks send {sent:,} "
                    f"elements, but receive {received:,}."
                )
                facts = [
                    make_evidence(
                        f"rank {one.rank}: sends {one.num_inputs:,} and receives {one.num_outputs:,} elements"
                        f"{_format_place(one)}",
                        [one.rank],
                    )
                    for one in calls
                ]
                reason = "The split sizes of the ranks contradict each other."
                yield calls[0].issued, _make_finding(sentence, reason, NEXT_STEPS["mismatch"], facts, ())
                break


def _find_size_problems(run: RecordedRun) -> Iterator[RunFinding]:
    """Yield the first calls of ranks whose input contradicts their own output."""
    found: dict[tuple[str, str, int], list[RecordedCall]] = defaultdict(list)
    for recording in run.recordings.values():
        if call := next((call for call in recording.calls if call.sizes_problem), None):
            found[call.sizes_problem, call.axis, call.sequence].append(call)
    for (problem, axis, sequence), calls in found.items():
        ranks = tuple(sorted(call.rank for call in calls))
        who = conjugate(format_ranks(ranks), problem, len(ranks))
        facts = [
            make_evidence(f"rank {call.rank}: call {sequence:,} on {axis}{_format_place(call)}", [call.rank])
            for call in calls
        ]
        yield _make_finding(f"Traffic mismatch: {who}.", "", NEXT_STEPS["mismatch"], facts, ranks)


def _find_deadlock(run: RecordedRun, standing: dict[int, StallItem], positions: Positions) -> Deadlock | None:
    deadlock = find_deadlock(standing, positions, None)
    if deadlock is None or deadlock.kind != "transfer":
        return deadlock
    absent = tuple(rank for rank in deadlock.at.group.ranks if rank in run.without_dump)
    if deadlock.at.sequence is None:
        peers = deadlock.at.missing
        return deadlock._replace(kind="missing", roots=peers) if set(peers) <= set(run.without_dump) else deadlock
    return deadlock._replace(kind="missing", roots=absent) if absent else deadlock


def _describe_deadlock(run: RecordedRun, deadlock: Deadlock, standing: dict[int, StallItem]) -> RunFinding:
    sides = _list_sides(run, standing, deadlock.roots)
    planned = PlannedRun({}, {}, run.world_size)
    at, roots = deadlock.at, deadlock.roots
    waiting = _find_waiting(standing, roots)
    if deadlock.kind == "transfer":
        call = f"{at.op} {at.sequence:,}" if at.sequence is not None else f"{at.op} of rank {at.rank}"
        sentence = (
            f"Stalled: the {call} on {format_group(at.group)} ({format_ranks(at.group.ranks)}) does not complete."
        )
        reason = "All ranks of the group have entered the call, but the transfer does not complete."
        return _make_finding(sentence, _describe_states(run, at) or reason, NEXT_STEPS["link"], sides, ())
    if set(roots) <= set(run.without_dump):
        verb = "waits" if len(waiting) == 1 else "wait"
        sentence = (
            f"Stalled: {format_ranks(waiting)} {verb} in {at.op} {at.sequence or 0:,} on {format_group(at.group)}, "
            f"and the import has no dump of {format_ranks(roots)}."
        )
        return _make_finding(sentence, "", NO_DUMP_NEXT, sides, roots)
    if at.sequence is None:
        sentence = (
            f"Stalled: {format_ranks([at.rank])} waits in {at.op} for {format_ranks(roots)} "
            f"on {format_group(at.group)} ({format_ranks(at.group.ranks)})."
        )
        return _make_finding(sentence, _describe_last(run, roots), LAST_CALL_NEXT, sides, roots)
    cause: Cause = (
        "mismatch" if deadlock.kind == "mismatch" else "skipped call" if deadlock.kind == "skipped" else "unknown"
    )
    stuck = describe_stuck_ranks(cause, roots, deadlock, planned, waiting)
    following = LAST_CALL_NEXT if deadlock.kind == "missing" else NEXT_STEPS[cause]
    return _make_finding(f"Stalled: {stuck}.", _describe_last(run, roots), following, sides, roots)


def _find_waiting(standing: dict[int, StallItem], roots: tuple[int, ...]) -> list[int]:
    """Return the ranks that wait for the roots, also through other ranks."""
    groups = {
        rank: {other for one in item["groups"] if one.get("blocking") for other in one["group"]["ranks"]}
        for rank, item in standing.items()
        if rank not in roots
    }
    waiting: set[int] = set()
    while found := {rank for rank, group in groups.items() if rank not in waiting and group & (waiting | set(roots))}:
        waiting |= found
    return sorted(waiting)


def _describe_states(run: RecordedRun, at: BlockedRank) -> str:
    """Return the sentence about ranks of a call whose states differ, or ""."""
    by_state: dict[str, list[int]] = defaultdict(list)
    for rank in run.members[at.group]:
        call = run.get_call(rank, at.group, at.sequence) if at.sequence is not None else None
        if call is not None and call.is_done is not None:
            by_state["has completed" if call.is_done else "has started" if call.has_started else "waits"].append(rank)
    if len(by_state) < 2:
        return ""
    parts = [f"it {state} on {format_ranks(ranks)}" for state, ranks in sorted(by_state.items())]
    return capitalize(f"{', and '.join(parts)}.")


def _describe_last(run: RecordedRun, roots: tuple[int, ...]) -> str:
    """Return the last recorded call of the first rank that others wait for."""
    rank = next((rank for rank in roots if rank in run.recordings), None)
    if rank is None:
        return ""
    last = run.get_last(rank)
    if last is None:
        return f"The dump of rank {rank} has no call."
    call, group = last
    return (
        f"The last recorded call of rank {rank} is {call.text} "
        f"(call {call.sequence:,} on {format_group(group)}){_format_place(call)}."
    )


def _list_sides(run: RecordedRun, standing: dict[int, StallItem], roots: tuple[int, ...]) -> list[Evidence]:
    """Return one sentence per group of ranks with the same pending call and line, and the last calls of the roots."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(run.recordings):
        if rank in standing and rank not in roots:
            by_text[describe_side(standing[rank])].append(rank)
        elif (last := run.get_last(rank)) is not None:
            call, group = last
            number = f"call {call.sequence:,} on {format_group(group)}"
            by_text[f"last called {call.text} ({number}){_format_place(call)}"].append(rank)
    sides = sorted(by_text.items(), key=lambda side: not set(side[1]) & set(roots))
    return [make_evidence(f"{format_ranks(ranks)}: {text}", ranks) for text, ranks in sides]


def _find_absent_ranks(run: RecordedRun, findings: list[RunFinding]) -> Iterator[RunFinding]:
    """Yield the calls that some ranks of a group have not entered, if no finding names the group."""
    for group in run.groups:
        issued = {rank: run.get_issued(rank, group) for rank in run.members[group]}
        numbers = sorted(set(issued.values()) - {UNKNOWN_CALL})
        name = f"on {format_group(group)}"
        if len(numbers) < 2 or any(f"{name} " in one.sentence or f"{name}," in one.sentence for one in findings):
            continue
        first, following = next(pairwise(numbers))
        absent = tuple(rank for rank, number in issued.items() if number == first)
        entered = next(rank for rank, number in issued.items() if number >= following)
        call = run.get_call(entered, group, first + 1)
        op = call.op if call is not None else "call"
        sentence = (
            f"Stalled: {format_ranks(absent)} did not enter {op} {first + 1:,} {name} ({format_ranks(group.ranks)})."
        )
        facts = _list_call_sides(
            run,
            group,
            first + 1,
            {rank: call.text for rank in run.members[group] if (call := run.get_call(rank, group, first + 1))},
        )
        yield _make_finding(sentence, _describe_last(run, absent), LAST_CALL_NEXT, facts, absent)


def _make_finding(
    sentence: str, reason: str, following: str, facts: list[Evidence], ranks: tuple[int, ...]
) -> RunFinding:
    further = (
        [make_evidence(f"{len(facts) - MAX_SIDES:,} further sides are not shown")] if len(facts) > MAX_SIDES else []
    )
    evidence = (*facts[:MAX_SIDES], *further)
    return RunFinding("hung", 1.0, truncate(sentence), reason, following, evidence, "", min(ranks, default=-1))
