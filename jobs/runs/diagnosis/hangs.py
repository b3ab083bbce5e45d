"""Detect hangs: which rank waits for which, in which call and line, the cause, and the next step.

Positions that contradict each other, and processes that are stopped or have ended, are certain after two reports. A
rank that others wait for hangs if its process sleeps in one line for IDLE_S. A rank that computes is slow: the verdict
says who waits for it, and calls it a hang only after a threshold. For Meshboard's trainer, the threshold follows the
step time and the phase. For a script, it is LEARNED_MARGIN_S above the longest earlier pause at the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from contracts.telemetry.batches import Item
from contracts.telemetry.items import WARMUP_STEPS, ProcessItem, StallItem
from jobs.core.verdict_schema import MAX_FRAME_CHARACTERS, MAX_NAMED_RANKS, MAX_STACK_FRAMES, Cause, Evidence, Hang
from jobs.runs.diagnosis.deadlocks import FIRST_RENDEZVOUS, Deadlock, Positions, find_deadlock
from jobs.runs.diagnosis.findings import RunFinding, capitalize, format_ranks, format_seconds, make_evidence, truncate
from jobs.runs.diagnosis.hang_texts import (
    DOINGS,
    LEFT_NEXT,
    NEXT_STEPS,
    conjugate,
    describe_calls,
    describe_side,
    describe_stuck_ranks,
    get_mismatch_step,
)
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_activity import (
    CROWDED,
    ENDED_KINDS,
    IDLE_KINDS,
    Activity,
    Kind,
    RankActivities,
    get_known_kind,
)
from jobs.runs.diagnosis.rank_reports import ProcessStates, RankProgress, StepTimings
from jobs.runs.diagnosis.traced_step import TracedStep

CERTAIN_S = 4.0  # two reports
IDLE_S = 7.5  # of a rank that sleeps while others wait for it
TRANSFER_S = 10.0  # of a collective that all ranks have entered and whose processes use no CPU
SLOW_TRANSFER_S = 60.0
START_S = 60.0  # in which all ranks connect
NOTICE_S = 5.0  # from which the verdict names a slow rank that others wait for
LEARNED_MARGIN_S = 10.0
MIN_PAUSES = 3  # at one line, whose length limits later pauses of a busy rank
MIN_THRESHOLD_S, PACES = 10.0, 10.0
SLOW_S, EVAL_S, CHECKPOINT_S = 300.0, 60.0, 120.0
SCRIPT_THRESHOLDS_S: dict[Kind, float] = {"data": 60.0, "file": 60.0, "checkpoint": CHECKPOINT_S}
EXTRA_REPORT_S = 5.0  # above the threshold, in which awaited ranks may still report
MAX_SILENCE_S = 8.0  # hosts send gauges every few seconds
MIN_CPU_SHARE = 0.05  # a smaller share makes the threshold no longer
MAX_FOUND_AGE_S = 10.0  # of a hang that explains a failure
MAX_SIDES = 6
CAUSES: dict[Kind, Cause] = {
    "stopped": "stopped",
    "gone": "dead",
    "ended": "dead",
    "quota": "quota",
    "data": "data",
    "file": "data",
    "checkpoint": "checkpoint",
    "unknown": "unknown",
}


class Blame(NamedTuple):
    """Name the cause of a hang and its ranks. `threshold_s`: time without progress from which it is a hang."""

    cause: Cause
    ranks: tuple[int, ...]
    reason: str
    since: float
    threshold_s: float
    is_slow: bool = False  # the ranks are known to be slow, which the verdict names before the threshold
    following: str = ""


class FoundHang(NamedTuple):
    """A hang that was found shortly before the end."""

    deadlock: Deadlock | None
    blame: Blame
    waiting: tuple[int, ...]
    evidence: tuple[Evidence, ...]


class HangDetector:
    """Detect whether ranks wait for a rank that does not come."""

    def __init__(self, run: PlannedRun, steps: StepTimings, progress: RankProgress, processes: ProcessStates) -> None:
        self._run, self._steps, self._progress, self._processes = run, steps, progress, processes
        self.positions, self._activities = Positions(run.world_size), RankActivities()
        self._found: tuple[float, FoundHang] | None = None  # last one, with its time
        self._last_detection = 0.0
        self._first_error: float | None = None  # first detection after a rank ended with an error

    @property
    def ended(self) -> dict[int, StallItem]:
        """Return the last reports of ranks that have ended by themselves."""
        return self._activities.ended

    def get_last_found(self) -> FoundHang | None:
        """Return the hang that was found in the last detections, or before the first rank ended with an error."""
        end = self._last_detection if self._first_error is None else self._first_error
        if self._found is None or end - self._found[0] > MAX_FOUND_AGE_S:
            return None
        return self._found[1]

    def add(self, item: Item) -> None:
        if item["kind"] == "standing":
            self.positions.add(item)
        self._activities.add(item)

    def get_threshold_s(self, now: float) -> float:
        """Return the seconds without progress after which a run of Meshboard's trainer counts as hung."""
        if self._run.is_script:
            return SLOW_S
        phases = set(self._progress.phases.values())
        is_warm = self._steps.ran > WARMUP_STEPS and self._steps.median_s is not None
        if not is_warm or self._is_starting_or_ending():
            return SLOW_S
        pace = self._get_pace_s()
        if any(item["phase"] == "checkpoint" or get_known_kind(item["stack"]) == "checkpoint" for item in self._items):
            longest_s = self._steps.longest_save_s
            return max(pace, longest_s + LEARNED_MARGIN_S if longest_s else CHECKPOINT_S)
        return max(pace, EVAL_S) if "eval" in phases else pace

    @property
    def _items(self) -> list[StallItem]:
        return list(self._progress.blocked.values())

    def _is_starting_or_ending(self) -> bool:
        phases = set(self._progress.phases.values())
        return not self._run.is_script and (bool(phases & {"setup", "proof"}) or phases == {"teardown"})

    def _get_pace_s(self) -> float:
        """Return the threshold of training itself, at most LEARNED_MARGIN_S above the longest recent step."""
        if self._steps.median_s is None or self._run.is_script:
            return SLOW_S
        usual_s = max(MIN_THRESHOLD_S, PACES * self._steps.median_s, 2 * self._steps.longest_s)
        return min(usual_s, self._steps.longest_s + LEARNED_MARGIN_S)

    def detect(self, now: float, last: TracedStep | None) -> tuple[Hang, RunFinding] | None:
        """Return the hang and its finding. `last`: the last traced step."""
        self._last_detection, last_message = now, self._progress.last_message
        if self._first_error is None and any(item.get("ended") for item in self.ended.values()):
            self._first_error = now
        if last_message is None or now - last_message > MAX_SILENCE_S:  # the board's link is broken
            return None
        deadlock = find_deadlock(self._progress.blocked, self.positions, last)
        blame = self._blame_stopped(now) or self._find_blame(deadlock, now)
        if blame is None:
            return None
        stalled_s = now - blame.since
        is_hung = stalled_s >= blame.threshold_s
        if not is_hung and not (blame.is_slow and stalled_s >= NOTICE_S):
            return None
        hang, finding = self._make_finding(deadlock, blame, stalled_s, now, is_hung=is_hung)
        waiting = tuple(rank for rank in hang["waiting"] if rank not in blame.ranks)
        # After a timeout of one rank, the launcher ends the other ranks, which is not the cause.
        if self._first_error is None or self.get_last_found() is None:
            self._found = now, FoundHang(deadlock, blame, waiting, finding.evidence)
        return hang, finding

    def _blame_stopped(self, now: float) -> Blame | None:
        """Blame processes that a signal stopped, also inside a collective."""
        ranks = [rank for rank in range(self._run.world_size) if self._is_stopped(rank, now)]
        since = self._progress.last_progress
        if not ranks or since is None:
            return None
        who = format_ranks(ranks)
        words = "The processes of {} are stopped." if len(ranks) > 1 else "The process of {} is stopped."
        return Blame("stopped", tuple(ranks), words.format(who), since, CERTAIN_S)

    def _is_stopped(self, rank: int, now: float) -> bool:
        item = self._get_sample(rank, now)
        return item is not None and item["state"] == "stopped"

    def _find_blame(self, deadlock: Deadlock | None, now: float) -> Blame | None:
        if deadlock is None:
            return self._blame_pause(now)
        if deadlock.kind == "missing":
            return self._blame_missing(deadlock, now)
        involved = (*deadlock.roots, deadlock.at.rank)
        since = self._get_since(involved)
        has_agreed = all(self._activities.has_agreed(rank) for rank in involved)
        fallback_s = self.get_threshold_s(now)
        if deadlock.kind == "skipped":
            who = capitalize(format_ranks(deadlock.roots))
            reason = (
                f"{who} skipped a collective, called an extra one, or calls them in another order, "
                "so the ranks wait in different collectives."
            )
            if deadlock.calls:
                calls = describe_calls(deadlock.at.group, deadlock.at.sequence or 0, deadlock.calls, deadlock.roots)
                reason = f"{calls} {reason}"
            is_final = has_agreed and all(self._activities.is_settled(rank) for rank in involved)
            return Blame("skipped call", deadlock.roots, reason, since, CERTAIN_S if is_final else fallback_s)
        if deadlock.kind == "mismatch":
            at, reason = deadlock.at, "The operation or size of the collective differs between ranks."
            if deadlock.calls:
                reason = describe_calls(at.group, at.sequence or 0, deadlock.calls, deadlock.roots)
            threshold_s = CERTAIN_S if has_agreed else fallback_s
            following = get_mismatch_step(deadlock.calls)
            return Blame("mismatch", deadlock.roots, reason, since, threshold_s, following=following)
        if gone := [rank for rank in deadlock.at.group.ranks if self._classify(rank).kind == "gone"]:
            return self._blame_activity(tuple(gone), Activity("gone", "", ""), since, now)
        is_idle = all(self._activities.is_transfer_idle(rank, since) for rank in deadlock.at.group.ranks)
        reason = "All ranks of the group have entered the collective, but the transfer does not complete."
        slow_s = SLOW_TRANSFER_S if self._run.is_script else fallback_s
        return Blame("link", (), reason, since, TRANSFER_S if is_idle else slow_s)

    def _get_since(self, ranks: Sequence[int]) -> float:
        """Return the time since when all of these ranks make no progress."""
        known = [at for rank in ranks if (at := self._progress.get_last_progress(rank)) is not None]
        return max(known, default=self._progress.last_progress or 0.0)

    def _classify(self, rank: int) -> Activity:
        return self._activities.classify(rank, self._progress.get_last_progress(rank) or 0.0)

    def _blame_missing(self, deadlock: Deadlock, now: float) -> Blame | None:
        """Blame the ranks that others wait for: those that cannot come before those that sleep or are slow."""
        activities = {rank: self._classify(rank) for rank in deadlock.roots}
        for rank, activity in activities.items():
            last = self._progress.get_last_progress(rank)
            if activity.kind == "unknown" and last is not None and now - last < NOTICE_S:
                activities[rank] = activity._replace(kind="moving")
        known = {rank: activity for rank, activity in activities.items() if activity.kind != "moving"}
        if not known:
            return None
        since = self._get_since((deadlock.at.rank,))
        reachable = [rank for rank, activity in known.items() if activity.kind in ENDED_KINDS]
        if not reachable and (silent := self._blame_silent_host(tuple(known), since, now)):
            return silent
        _, worst = min((_get_order(activity.kind), rank) for rank, activity in known.items())
        ranks = tuple(sorted(rank for rank, activity in known.items() if activity.kind == known[worst].kind))
        since = self._get_since((worst, deadlock.at.rank))
        has_agreed = self._activities.has_agreed(deadlock.at.rank)
        blame = self._blame_activity(ranks, known[worst], since, now, has_agreed)
        if deadlock.at.call == FIRST_RENDEZVOUS and known[worst].kind not in ENDED_KINDS:  # ranks may start late
            return blame._replace(threshold_s=max(blame.threshold_s, START_S), is_slow=True)
        return blame

    def _blame_pause(self, now: float) -> Blame | None:
        """Blame ranks that make no progress although none waits for another."""
        since = self._progress.last_progress
        ranks = tuple(sorted(set(self._progress.blocked) - set(self._activities.ended)))
        if since is None or (self._activities.ended and not ranks):
            return None
        activities = {rank: self._classify(rank) for rank in ranks}
        waiting = tuple(rank for rank in ranks if activities[rank].kind in ("lock", "input"))
        if waiting:
            return self._blame_activity(waiting, activities[waiting[0]], since, now)
        activity = activities[ranks[0]] if ranks else Activity("unknown", "", "")
        blame = self._blame_activity(ranks, activity, since, now, has_agreed=False)
        return blame._replace(is_slow=blame.cause == "checkpoint" and blame.is_slow)

    def _blame_silent_host(self, roots: Sequence[int], since: float, now: float) -> Blame | None:
        silent = tuple(
            rank
            for rank in roots
            if now - self._progress.last_contact.get(self._run.get_node(rank), now) > MAX_SILENCE_S
        )
        if not silent:
            return None
        reason = f"Meshboard has lost contact with {self._run.get_host(silent[0]) or 'its host'}."
        return Blame("link", silent, reason, since, self.get_threshold_s(now))

    def _blame_activity(
        self, ranks: tuple[int, ...], activity: Activity, since: float, now: float, has_agreed: bool = True
    ) -> Blame:
        """Blame ranks for what they do outside of collectives."""
        kind = activity.kind
        threshold_s = self._get_activity_threshold_s(ranks, kind, now, has_agreed=has_agreed)
        is_slow = kind not in ENDED_KINDS | IDLE_KINDS | {"outside", "unknown"}
        following = LEFT_NEXT if kind == "ended" and not self._activities.ended[ranks[0]].get("ended") else ""
        reason = self._describe_activity(ranks, activity, now)
        return Blame(CAUSES.get(kind, "compute"), ranks, reason, since, threshold_s, is_slow, following)

    def _get_activity_threshold_s(self, ranks: Sequence[int], kind: Kind, now: float, *, has_agreed: bool) -> float:
        if kind in ENDED_KINDS:
            return CERTAIN_S if has_agreed else MIN_THRESHOLD_S
        if kind in IDLE_KINDS and has_agreed and not self._is_starting_or_ending():
            learned = max((self._activities.get_pause_s(rank) or 0.0 for rank in ranks), default=0.0)
            return max(IDLE_S, learned + LEARNED_MARGIN_S) if learned else IDLE_S
        if not self._run.is_script:
            threshold_s = self._extend_for_lack_of_cpu(self.get_threshold_s(now), self._get_cpu_share(ranks, now))
            return threshold_s + (EXTRA_REPORT_S if kind == "unknown" and ranks else 0.0)
        if kind in ("crowded", "quota"):
            return SLOW_S
        pauses = [self._activities.get_pause_s(rank, min_pauses=MIN_PAUSES) for rank in ranks]
        if pauses and all(pause is not None for pause in pauses):
            return max(pause or 0.0 for pause in pauses) + LEARNED_MARGIN_S
        return SCRIPT_THRESHOLDS_S.get(kind, SLOW_S)

    def _extend_for_lack_of_cpu(self, threshold_s: float, share: float) -> float:
        """Return the threshold of a rank with a share of a CPU. The work takes longer, and the margin does not."""
        work_s = max(threshold_s - LEARNED_MARGIN_S, self._steps.longest_s)
        return max(threshold_s, min(work_s / share + LEARNED_MARGIN_S, SLOW_S)) if share < 1 else threshold_s

    def _get_cpu_share(self, ranks: Sequence[int], now: float) -> float:
        """Return the share of the time in which the first rank gets a CPU if it needs one."""
        item = self._get_sample(ranks[0], now) if ranks else None
        delay = max(item["throttled"], item.get("crowded", 0.0)) if item is not None else 0.0
        return max(MIN_CPU_SHARE, 1.0 - delay) if delay >= CROWDED else 1.0

    def _describe_activity(self, ranks: tuple[int, ...], activity: Activity, now: float) -> str:
        kind, who = activity.kind, format_ranks(ranks)
        where = f" in {activity.place}" if activity.place else ""
        where += f": `{activity.source}`" if activity.place and activity.source else ""
        item = self._get_sample(ranks[0], now) if ranks else None
        if kind == "gone":
            return f"The process{'es' if len(ranks) > 1 else ''} of {who} {'have' if len(ranks) > 1 else 'has'} ended."
        if kind == "ended":
            error = self._activities.ended[ranks[0]].get("ended", "")
            how = f"with {error.splitlines()[0].rstrip('.')}" if error else "without an error"
            return f"{capitalize(who)} ended {how}{where}."
        if kind == "quota" and item is not None:
            throttled = format_seconds(item["throttled"])
            return f"A CPU quota throttles rank {ranks[0]} for {throttled} of each second."
        if kind == "checkpoint":
            return f"A checkpoint is being saved on {who}{where}."
        if kind == "data":
            return f"Training data is being loaded on {who}{where}."
        if kind == "unknown":
            return f"No current operation is known{f' for {who}' if ranks else ''}."
        busy = f", using {item['cpu']:.2g} CPU cores" if item is not None and kind in ("outside", "busy") else ""
        if kind == "crowded":
            busy = ", but waits for a CPU that other processes use"
        if kind in DOINGS:
            return f"{capitalize(conjugate(who, DOINGS[kind], len(ranks)))}{where}{busy}."
        return f"Code outside of collectives runs on {who}{where}{busy}."

    def _get_sample(self, rank: int, now: float) -> ProcessItem | None:
        """Return the sample of a rank's process after the last progress. Older samples are ignored."""
        item, last = self._processes.get_process(rank, now), self._progress.last_progress
        return item if item is not None and last is not None and item["time"] >= last else None

    def _get_stack(self, ranks: Sequence[int], now: float) -> list[str]:
        for rank in ranks:
            blocked, process = self._progress.blocked.get(rank), self._get_sample(rank, now)
            if process is not None and process["stack"]:
                return process["stack"]
            if blocked is not None and blocked["stack"]:
                return blocked["stack"]
            if rank in self._activities.ended:
                return self._activities.ended[rank]["stack"]
        return []

    def _make_finding(
        self, deadlock: Deadlock | None, blame: Blame, stalled_s: float, now: float, *, is_hung: bool
    ) -> tuple[Hang, RunFinding]:
        at = deadlock.at if deadlock is not None else None
        waiting = [rank for rank in (deadlock.waiting if deadlock is not None else ()) if rank not in blame.ranks]
        stack = self._get_stack(blame.ranks[:1] or (at.rank,) if at is not None else blame.ranks[:1], now)
        named_ranks = blame.ranks or (at.group.ranks if at is not None else ())
        host = self._format_hosts(named_ranks)
        step = max((item["step"] for item in self._items), default=self._steps.last)
        hang: Hang = {
            "cause": blame.cause,
            "since": blame.since,
            "still_s": stalled_s,
            "threshold_s": blame.threshold_s,
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
        if at is not None:
            axis, ranks, nth = at.group
            hang["group"] = {"axis": axis, "ranks": list(ranks[:MAX_NAMED_RANKS]), "size": len(ranks), "nth": nth}
        sentence = _make_sentence(blame, deadlock, stalled_s, self._run, waiting, is_hung=is_hung)
        hang["text"] = truncate(f"{sentence} {blame.reason}")
        facts = [*self._list_sides(deadlock, blame), *self._list_facts(blame, stalled_s, step, waiting, stack)]
        item = self._get_sample(blame.ranks[0], now) if blame.ranks else None
        pid = item.get("pid", "PID") if item is not None else "PID"
        named = f"host {host}" if host else "the host"
        following = blame.following or NEXT_STEPS[blame.cause].format(host=host or "the host", named=named, pid=pid)
        state: Literal["hung", "notice"] = "hung" if is_hung else "notice"
        log_rank = min(blame.ranks, default=-1)
        action = "" if blame.cause == "stopped" else "open_log"  # the log of a stopped process has no reason
        return hang, RunFinding(state, 1.0, sentence, blame.reason, following, tuple(facts), action, log_rank)  # type: ignore[arg-type]

    def _list_facts(
        self, blame: Blame, stalled_s: float, step: int, waiting: Sequence[int], stack: Sequence[str]
    ) -> list[Evidence]:
        no_progress = f"no progress for {format_seconds(stalled_s)}, in step {step + 1}"
        facts = [make_evidence(no_progress, blame.ranks)]
        if waiting:
            facts.append(make_evidence(f"{format_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'}", waiting))
        if stack:
            facts.append(make_evidence(f"the innermost Python frame is {stack[-1]}", blame.ranks[:1]))
        return facts

    def _list_sides(self, deadlock: Deadlock | None, blame: Blame) -> list[Evidence]:
        """Return one sentence per group of ranks with the same call and line."""
        by_text: dict[str, list[int]] = {}
        for rank, item in sorted(self._progress.blocked.items()):
            by_text.setdefault(describe_side(item), []).append(rank)
        sides = [(text, ranks) for text, ranks in by_text.items() if text]
        sides.sort(key=lambda side: not set(side[1]) & set(blame.ranks))
        return [make_evidence(f"{format_ranks(ranks)}: {text}", ranks) for text, ranks in sides[:MAX_SIDES]]

    def _format_hosts(self, ranks: Sequence[int]) -> str:
        """Return "host-a", or "host-a and host-b" for ranks on several hosts."""
        hosts = list(dict.fromkeys(host for rank in ranks if (host := self._run.get_host(rank))))
        return hosts[0] if len(hosts) == 1 else " and ".join((", ".join(hosts[:-1]), hosts[-1])) if hosts else ""


def _get_order(kind: Kind) -> int:
    if kind in ENDED_KINDS:
        return 0
    return 1 if kind in IDLE_KINDS else {"unknown": 4, "outside": 3}.get(kind, 2)


def _make_sentence(
    blame: Blame, deadlock: Deadlock | None, stalled_s: float, run: PlannedRun, waiting: Sequence[int], *, is_hung: bool
) -> str:
    state = "Stalled" if is_hung else "Waiting"
    if blame.cause == "checkpoint":
        on_ranks = f" on {format_ranks(blame.ranks)}" if blame.ranks else ""
        return f"{state}: training has waited {format_seconds(stalled_s)} for a checkpoint{on_ranks}."
    stuck = describe_stuck_ranks(blame.cause, blame.ranks, deadlock, run, waiting)
    return f"{state}: no progress for {format_seconds(stalled_s)}. {capitalize(stuck)}."
