"""Detect hangs: the time since the last progress, the collective, the rank that causes it, and the next step.

A run hangs if nothing ended on any rank for a threshold while its hosts still send. The threshold is PACES times the
median step time, from MIN_THRESHOLD_S to MAX_THRESHOLD_S, and at least twice the longest recent step. Slow phases have
more: SLOW_S for the first steps, verification, and compilation, EVAL_S for a validation, CHECKPOINT_S or twice the
longest checkpoint. A process that its host sees stopped or gone explains a hang after MIN_THRESHOLD_S. The positions of
ranks in their groups show why all ranks are blocked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from contracts.telemetry.items import WARMUP_STEPS, GroupProgress, Op, ProcessItem, StallItem
from jobs.core.verdict_schema import MAX_FRAME_CHARACTERS, MAX_NAMED_RANKS, MAX_STACK_FRAMES, Cause, Hang
from jobs.runs.diagnosis.findings import RunFinding, capitalize, format_ranks, format_seconds, make_evidence, truncate
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_reports import THROTTLED, ProcessStates, RankProgress, StepTimings
from jobs.runs.diagnosis.traced_step import POINT_TO_POINT, ProcessGroup, TracedStep

MIN_THRESHOLD_S, MAX_THRESHOLD_S, PACES = 10.0, 60.0, 10.0
SLOW_S, EVAL_S, CHECKPOINT_S = 300.0, 60.0, 120.0
EXTRA_REPORT_S = 5.0  # above the threshold, in which awaited ranks may still report
MAX_SILENCE_S = 8.0  # hosts send gauges every few seconds
LOADING_FRAMES = ("dataload", "corpus", "dataset", "next_batch", "tokenize", "fetch")
SAVING_FRAMES = ("workers/checkpoint", "distributed/checkpoint", "torch/serialization", "save_checkpoint")
NEXT_STEPS: dict[str, str] = {
    "stopped": "Run `kill -CONT {pid}` on {named}, and find what stopped the process.",
    "dead": "Read the log of the rank, and check {host}. Other ranks end at the collective timeout.",
    "skipped call": "Find the code branch that depends on rank or data and skips the collective.",
    "mismatch": "Print tensor shapes and dtypes before the collective on every rank.",
    "link": "Check the cables, routes, and firewalls of {host}.",
    "data": "Check the storage from which {host} reads training data.",
    "quota": "Raise the CPU quota of the job's cgroup on {host}.",
    "checkpoint": "Check the disk on which {host} saves checkpoints.",
    "compute": "Read the Python stack of the rank.",
    "unknown": "Read the logs of the ranks.",
}


class Blame(NamedTuple):
    """Name the cause of a hang and its ranks."""

    cause: Cause
    ranks: tuple[int, ...]
    reason: str


class HangDetector:
    """Detect whether the run makes no progress."""

    def __init__(self, run: PlannedRun, steps: StepTimings, progress: RankProgress, processes: ProcessStates) -> None:
        self._run, self._steps, self._progress, self._processes = run, steps, progress, processes

    def get_threshold_s(self, now: float) -> float:
        """Return the seconds without progress after which the run counts as hung."""
        samples = (self._get_sample(rank, now) for rank in range(self._run.world_size))
        if any(item is not None and item["state"] in ("stopped", "zombie", "gone") for item in samples):
            return MIN_THRESHOLD_S
        phases = set(self._progress.phases.values())
        is_warm = self._steps.ran > WARMUP_STEPS and self._steps.median_s is not None
        if not is_warm or phases & {"setup", "proof"} or phases == {"teardown"}:
            return SLOW_S
        pace = self._get_pace_s()
        if self._is_saving():
            return max(pace, CHECKPOINT_S, 2 * self._steps.longest_save_s)
        return max(pace, EVAL_S) if "eval" in phases else pace

    def _get_sample(self, rank: int, now: float) -> ProcessItem | None:
        """Return the sample of a rank's process after the last progress. Older samples are ignored."""
        item, last = self._processes.get_process(rank, now), self._progress.last_progress
        return item if item is not None and last is not None and item["time"] >= last else None

    def _is_saving(self) -> bool:
        items = self._progress.blocked.values()
        return any(item["phase"] == "checkpoint" or _is_in_stack(item["stack"], SAVING_FRAMES) for item in items)

    def detect(self, now: float, last: TracedStep | None) -> tuple[Hang, RunFinding] | None:
        """Return the hang and its finding. `last`: the last traced step."""
        since, last_message = self._progress.last_progress, self._progress.last_message
        if since is None or last_message is None:
            return None
        stalled_s, threshold = now - since, self.get_threshold_s(now)
        pace = min(threshold, self._get_pace_s())
        if stalled_s < pace or now - last_message > MAX_SILENCE_S:  # all hosts are silent: the board's link is broken
            return None
        saving = self._is_saving()
        if stalled_s < threshold and not saving:
            return None
        deadlock = find_deadlock(self._progress.blocked, self._run.world_size, last)
        blame = self._find_cause(deadlock, now)
        if blame.cause == "unknown" and blame.ranks and stalled_s < threshold + EXTRA_REPORT_S:
            return None
        if saving and blame.cause in ("compute", "unknown"):
            items = self._progress.blocked.values()
            ranks = tuple(sorted(item["rank"] for item in items if _is_in_stack(item["stack"], SAVING_FRAMES)))
            roots = deadlock.roots if deadlock is not None and deadlock.kind == "missing" else ()
            blame = Blame("checkpoint", roots or ranks, "Training waits until the checkpoint is saved.")
        threshold = threshold if blame.cause != "checkpoint" else pace
        return self._make_finding(deadlock, blame, since, stalled_s, threshold, now)

    def _get_pace_s(self) -> float:
        """Return the threshold of training itself."""
        if self._steps.median_s is None:
            return SLOW_S
        return max(MIN_THRESHOLD_S, min(PACES * self._steps.median_s, MAX_THRESHOLD_S), 2 * self._steps.longest_s)

    def _find_cause(self, deadlock: Deadlock | None, now: float) -> Blame:
        if blame := self._blame_process(deadlock, now):
            return blame
        if deadlock is None:
            return self._blame_own_code(tuple(sorted(self._progress.blocked)), now)
        if deadlock.kind == "missing":
            return self._blame_silent_host(deadlock.roots, now) or self._blame_own_code(deadlock.roots, now)
        if deadlock.kind == "skipped":
            who = capitalize(format_ranks(deadlock.roots))
            reason = f"{who} skipped a collective or called an extra one, so the ranks wait in different collectives."
            return Blame("skipped call", deadlock.roots, reason)
        if deadlock.kind == "mismatch":
            return Blame("mismatch", deadlock.roots, "The operation or size of the collective differs between ranks.")
        return Blame(
            "link", (), "All ranks of the group have entered the collective, but the transfer does not complete."
        )

    def _blame_process(self, deadlock: Deadlock | None, now: float) -> Blame | None:
        samples = {rank: self._get_sample(rank, now) for rank in range(self._run.world_size)}
        for states, cause, words in (
            (("stopped",), "stopped", ("The process of {} is stopped.", "The processes of {} are stopped.")),
            (("zombie", "gone"), "dead", ("The process of {} has ended.", "The processes of {} have ended.")),
        ):
            ranks = tuple(rank for rank, item in samples.items() if item is not None and item["state"] in states)
            if ranks:
                return Blame(cause, ranks, words[len(ranks) > 1].format(format_ranks(ranks)))  # type: ignore[arg-type]
        roots = deadlock.roots if deadlock is not None and deadlock.kind == "missing" else ()
        throttled = [rank for rank in roots if (item := samples[rank]) is not None and item["throttled"] >= THROTTLED]
        if throttled:
            item = samples[throttled[0]]
            assert item is not None
            seconds = format_seconds(item["throttled"])
            reason = f"A CPU quota throttles rank {throttled[0]} for {seconds} of each second."
            return Blame("quota", tuple(throttled), reason)
        return None

    def _blame_silent_host(self, roots: Sequence[int], now: float) -> Blame | None:
        silent = tuple(
            rank
            for rank in roots
            if now - self._progress.last_contact.get(self._run.get_node(rank), now) > MAX_SILENCE_S
        )
        if not silent:
            return None
        return Blame("link", silent, f"Meshboard has lost contact with {self._run.get_host(silent[0]) or 'its host'}.")

    def _blame_own_code(self, ranks: tuple[int, ...], now: float) -> Blame:
        """Blame ranks outside of collectives, by their Python stacks."""
        stack = self._get_stack(ranks[:1], now)
        item = self._get_sample(ranks[0], now) if ranks else None
        if _is_in_stack(stack, SAVING_FRAMES):
            return Blame("checkpoint", ranks, f"A checkpoint is being saved on {format_ranks(ranks)}.")
        if _is_in_stack(stack, LOADING_FRAMES):
            return Blame("data", ranks, f"Training data is being loaded on {format_ranks(ranks)}.")
        if not any(rank in self._progress.blocked or self._get_sample(rank, now) for rank in ranks):
            on_ranks = f" for {format_ranks(ranks)}" if ranks else ""
            return Blame("unknown", ranks, f"No current operation is known{on_ranks}.")
        busy = f", using {item['cpu']:.2g} CPU cores" if item is not None else ""
        return Blame("compute", ranks, f"Code outside of collectives runs on {format_ranks(ranks)}{busy}.")

    def _get_stack(self, ranks: Sequence[int], now: float) -> list[str]:
        for rank in ranks:
            blocked, process = self._progress.blocked.get(rank), self._get_sample(rank, now)
            if process is not None and process["stack"]:
                return process["stack"]
            if blocked is not None and blocked["stack"]:
                return blocked["stack"]
        return []

    def _make_finding(
        self, deadlock: Deadlock | None, blame: Blame, since: float, stalled_s: float, threshold: float, now: float
    ) -> tuple[Hang, RunFinding]:
        at = deadlock.at if deadlock is not None else None
        waiting = [rank for rank in (deadlock.waiting if deadlock is not None else ()) if rank not in blame.ranks]
        stack = self._get_stack(blame.ranks[:1] or (at.rank,) if at is not None else blame.ranks[:1], now)
        named_ranks = blame.ranks or (at.group.ranks if at is not None else ())
        host = self._format_hosts(named_ranks)
        step = max((item["step"] for item in self._progress.blocked.values()), default=self._steps.last)
        hang: Hang = {
            "cause": blame.cause,
            "since": since,
            "still_s": stalled_s,
            "threshold_s": threshold,
            "step": step,
            "ranks": list(blame.ranks[:MAX_NAMED_RANKS]),
            "host": host,
            "waiting": waiting[:MAX_NAMED_RANKS],
            "num_waiting": len(waiting),
            "group": None,
            "op": at.op if at is not None else "",
            "sequence": at.sequence if at is not None else None,
            "stack": [line[-MAX_FRAME_CHARACTERS:] for line in stack[-MAX_STACK_FRAMES:]],
            "text": "",
        }
        call = ""
        if at is not None:
            axis, ranks, nth = at.group
            hang["group"] = {"axis": axis, "ranks": list(ranks[:MAX_NAMED_RANKS]), "size": len(ranks), "nth": nth}
            number = f" {at.sequence:,}" if at.sequence is not None else ""
            call = f"{at.op}{number} on {axis} ({format_ranks(ranks)})"
        sentence = _make_sentence(blame, call, stalled_s, self._run, waiting)
        hang["text"] = truncate(f"{sentence} {blame.reason}")
        no_progress = f"no progress on any rank for {format_seconds(stalled_s)}, in step {step + 1}"
        facts = [make_evidence(no_progress, named_ranks)]
        if waiting:
            facts.append(make_evidence(f"{format_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'}", waiting))
        if stack:
            facts.append(make_evidence(f"the innermost Python frame is {stack[-1]}", blame.ranks[:1]))
        item = self._get_sample(blame.ranks[0], now) if blame.ranks else None
        pid = item.get("pid", "PID") if item is not None else "PID"
        named = f"host {host}" if host else "the host"
        following = NEXT_STEPS[blame.cause].format(host=host or "the host", named=named, pid=pid)
        state = "notice" if blame.cause == "checkpoint" and stalled_s < CHECKPOINT_S else "hung"
        log_rank = min(blame.ranks, default=-1)
        action = "" if blame.cause == "stopped" else "open_log"  # the log of a stopped process has no reason
        return hang, RunFinding(state, 1.0, sentence, blame.reason, following, tuple(facts), action, log_rank)  # type: ignore[arg-type]

    def _format_hosts(self, ranks: Sequence[int]) -> str:
        """Return "host-a", or "host-a and host-b" for ranks on several hosts."""
        hosts = list(dict.fromkeys(host for rank in ranks if (host := self._run.get_host(rank))))
        return hosts[0] if len(hosts) == 1 else " and ".join((", ".join(hosts[:-1]), hosts[-1])) if hosts else ""


def _is_in_stack(stack: Sequence[str], words: Sequence[str]) -> bool:
    return any(word in line.lower() for line in stack for word in words)


def _make_sentence(blame: Blame, call: str, stalled_s: float, run: PlannedRun, waiting: Sequence[int]) -> str:
    if blame.cause == "checkpoint":
        on_ranks = f" on {format_ranks(blame.ranks)}" if blame.ranks else ""
        return f"Stalled: training has waited {format_seconds(stalled_s)} for a checkpoint{on_ranks}."
    stuck = capitalize(_describe_stuck_ranks(blame, call, run, waiting))
    return f"Stalled: no progress for {format_seconds(stalled_s)}. {stuck}."


def _describe_stuck_ranks(blame: Blame, call: str, run: PlannedRun, waiting: Sequence[int]) -> str:
    if not blame.ranks:
        return f"the collective {call} does not complete" if call else "all ranks are stuck"
    subject = run.format_rank(blame.ranks[0]) if len(blame.ranks) == 1 else format_ranks(blame.ranks)
    if not call:
        return f"{subject} {'is' if len(blame.ranks) == 1 else 'are'} stuck"
    if blame.cause == "mismatch":
        return f"{subject} entered {call} with another operation or size"
    if waiting:
        verb = "wait" if len(waiting) > 1 else "waits"
        return f"{format_ranks(waiting)} {verb} for {subject}, which did not enter {call}"
    return f"{subject} did not enter {call}"


class BlockedRank(NamedTuple):
    """Describe a rank in a collective that does not complete. `missing`: ranks that have not entered it."""

    rank: int
    group: ProcessGroup
    op: Op
    sequence: int | None  # None for messages, which are numbered per pair
    payload_bytes: int
    missing: tuple[int, ...]


class Deadlock(NamedTuple):
    """Explain why all ranks are blocked. "missing": the roots are outside of collectives. "transfer": none is."""

    kind: Literal["missing", "skipped", "mismatch", "transfer"]
    roots: tuple[int, ...]  # for which the others wait
    at: BlockedRank  # the collective in which the others wait
    waiting: tuple[int, ...]


def find_deadlock(standing: Mapping[int, StallItem], world_size: int, last: TracedStep | None) -> Deadlock | None:
    """Return the cause, or None if no rank is in a collective."""
    issued = {(rank, parse_group(one)): one["issued"] for rank, item in standing.items() for one in item["groups"]}
    blocked = {rank: one for rank, item in standing.items() if (one := _find_blocking_call(item, issued)) is not None}
    if not blocked:
        return None
    waited_for = {rank for one in blocked.values() for rank in one.missing if rank < world_size}
    if roots := waited_for - set(blocked):
        first = _find_most_common(one for one in blocked.values() if set(one.missing) & roots) or _find_most_common(
            blocked.values()
        )
        assert first is not None
        return Deadlock("missing", tuple(sorted(roots)), first, tuple(sorted(blocked)))
    stuck_call = _find_most_common(one for one in blocked.values() if one.sequence is not None and not one.missing)
    stuck_message = _find_most_common(one for one in blocked.values() if one.sequence is None)
    return (
        _find_mismatch(blocked, last)
        or _make_stuck(blocked, stuck_call)
        or _find_skipped_call(blocked, standing, last)
        or _make_stuck(blocked, stuck_message or _find_most_common(blocked.values()))
    )


def _make_stuck(blocked: Mapping[int, BlockedRank], at: BlockedRank | None) -> Deadlock | None:
    return Deadlock("transfer", (), at, tuple(sorted(blocked))) if at is not None else None


def parse_group(standing: GroupProgress) -> ProcessGroup:
    group = standing["group"]
    return ProcessGroup(group["axis"], tuple(group["ranks"]), group["nth"])


def _find_blocking_call(item: StallItem, issued: Mapping[tuple[int, ProcessGroup], int]) -> BlockedRank | None:
    """Return the collective in which the training thread is blocked, or else the oldest that is in flight.

    A message may be in flight long before a rank waits for it.
    """
    in_flight = [
        position
        for position in item["groups"]
        if "op" in position and (position.get("blocking") or position["op"] not in POINT_TO_POINT)
    ]
    if not in_flight:
        return None
    position = min(in_flight, key=lambda position: (not position.get("blocking", False), position.get("since", 0.0)))
    group, op, rank = parse_group(position), position["op"], item["rank"]
    if op in POINT_TO_POINT:
        index = group.ranks.index(rank) if rank in group.ranks else 0
        neighbors = tuple(group.ranks[i] for i in (index - 1, index + 1) if 0 <= i < len(group.ranks) and i != index)
        missing = (position["peer"],) if "peer" in position else neighbors  # which exchange pipeline messages
        return BlockedRank(rank, group, op, None, position.get("payload_bytes", 0), missing)
    sequence = position.get("sequence", position["ended"] + 1)
    missing = tuple(other for other in group.ranks if issued.get((other, group), 0) < sequence and other != rank)
    return BlockedRank(rank, group, op, sequence, position.get("payload_bytes", 0), missing)


def _find_most_common(found: Iterable[BlockedRank]) -> BlockedRank | None:
    """Return a blocked rank of the collective with the most ranks."""
    candidates = list(found)
    if not candidates:
        return None
    counts = Counter((blocked.group, blocked.sequence) for blocked in candidates)
    key = counts.most_common(1)[0][0]
    return next(blocked for blocked in candidates if (blocked.group, blocked.sequence) == key)


def _find_mismatch(blocked: Mapping[int, BlockedRank], last: TracedStep | None) -> Deadlock | None:
    """Find ranks in the same collective with different operations or sizes."""
    by_collective: dict[tuple[ProcessGroup, int], list[BlockedRank]] = {}
    for one in blocked.values():
        if one.sequence is not None:
            by_collective.setdefault((one.group, one.sequence), []).append(one)
    for same_collective in by_collective.values():
        signatures = Counter((one.op, _get_compared_bytes(one)) for one in same_collective)
        if len(signatures) == 1:
            continue
        (usual, _), (odd, _) = signatures.most_common(2)
        is_tie = list(signatures.values()).count(signatures[usual]) == len(signatures)
        if is_tie and last is not None and not _is_followed_by(last, same_collective[0].group, usual, odd):
            odd, usual = usual, odd  # the rank that skipped one of two collectives is in the later one
        odd_ranks = tuple(sorted(one.rank for one in same_collective if (one.op, _get_compared_bytes(one)) == odd))
        at = next(one for one in same_collective if (one.op, _get_compared_bytes(one)) == usual)
        is_later = last is not None and _is_followed_by(last, at.group, usual, odd)
        others = tuple(sorted(rank for rank in blocked if rank not in odd_ranks))
        return Deadlock("skipped" if is_later else "mismatch", odd_ranks, at, others)
    return None


def _get_compared_bytes(one: BlockedRank) -> int:
    """Return the bytes that must be equal on all ranks. An all-to-all may differ between ranks."""
    return 0 if one.op in ("all_to_all", "barrier") else one.payload_bytes


Signature = tuple[Op, int]  # operation, bytes


def _is_followed_by(last: TracedStep, group: ProcessGroup, first: Signature, second: Signature) -> bool:
    """Return True if, in the last known step, a collective `second` comes right after `first`, cyclically."""
    order = _get_call_order(last, group)
    return (first, second) in zip(order, order[1:] + order[:1], strict=True)


def _get_call_order(last: TracedStep, group: ProcessGroup) -> list[Signature]:
    for rank_step in last.ranks.values():
        calls = [call for call in rank_step.calls if call.group == group and call.op not in POINT_TO_POINT]
        if calls:
            return [(c.op, 0 if c.op in ("all_to_all", "barrier") else c.payload_bytes) for c in calls]
    return []


def _find_skipped_call(
    blocked: Mapping[int, BlockedRank], standing: Mapping[int, StallItem], last: TracedStep | None
) -> Deadlock | None:
    """Find ranks that wait for each other in different collectives.

    The rank that is farthest in the step has skipped a collective. If the order of calls is unknown, the rank for
    which most others wait is the cause.
    """
    in_collectives = {rank for rank, one in blocked.items() if one.sequence is not None}
    absent = {rank for other in in_collectives for rank in blocked[other].missing if rank in in_collectives}
    if not absent:
        return None

    def get_position(rank: int) -> tuple[int, int, int]:
        alone = sum(one.missing == (rank,) for one in blocked.values())
        return standing[rank]["step"], _get_index(blocked[rank], last), alone

    farthest_position = max(map(get_position, absent))
    roots = tuple(sorted(rank for rank in absent if get_position(rank) == farthest_position))
    at = _find_most_common(one for one in blocked.values() if set(one.missing) & set(roots) and one.rank not in roots)
    if at is None:  # the roots only wait for each other
        at = next(one for one in blocked.values() if set(one.missing) & set(roots))
    return Deadlock("skipped", roots, at, tuple(sorted(set(blocked) - set(roots))))


def _get_index(one: BlockedRank, last: TracedStep | None) -> int:
    """Return the index of a collective among its rank's calls of a step, -1 if it is unknown."""
    rank_step = last.ranks.get(one.rank) if last is not None else None
    if rank_step is None or one.sequence is None:
        return -1
    indexes = [(i, call.sequence) for i, call in enumerate(rank_step.calls) if call.group == one.group]
    return indexes[(one.sequence - indexes[0][1]) % len(indexes)][0] if indexes else -1
