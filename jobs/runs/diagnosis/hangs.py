"""Detect hangs: the time since the last progress, the collective, the rank that causes it, and the next step.

A run hangs if nothing ended on any rank for a threshold while its hosts still send. The threshold is PACES times the
median step time, from 10 s to 60 s, and at least twice the longest recent step. Slow phases have more: SLOW_S for the
first steps, verification, and compilation, EVAL_S for a validation, CHECKPOINT_S or twice the longest checkpoint. A
process that its host sees stopped or gone explains a hang after LEAST_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contracts.telemetry.health import ProcessItem
from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.core.verdict_schema import MAX_FRAME_CHARACTERS, MAX_NAMED_RANKS, MAX_STACK_FRAMES, Cause, Hang
from jobs.runs.diagnosis.deadlocks import Deadlock, find_deadlock
from jobs.runs.diagnosis.findings import Finding, capitalize, format_ranks, format_seconds, make_evidence, truncate
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_activity import THROTTLED, ProcessStates, RankProgress
from jobs.runs.diagnosis.step_times import StepTimes
from jobs.runs.diagnosis.traced_step import TracedStep

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

    def __init__(self, run: PlannedRun, steps: StepTimes, progress: RankProgress, processes: ProcessStates) -> None:
        self._run, self._steps, self._progress, self._processes = run, steps, progress, processes

    def get_threshold_s(self, now: float) -> float:
        """Return the seconds without progress after which the run counts as hung."""
        if self._is_process_stopped(now):
            return MIN_THRESHOLD_S
        phases = set(self._progress.phases.values())
        if self._steps.ran <= WARMUP_STEPS or self._steps.median_s is None or phases & {"setup", "proof"}:
            return SLOW_S
        if phases == {"teardown"}:
            return SLOW_S
        pace = self._get_pace_s()
        if self._is_saving():
            return max(pace, CHECKPOINT_S, 2 * self._steps.longest_save_s)
        return max(pace, EVAL_S) if "eval" in phases else pace

    def _is_process_stopped(self, now: float) -> bool:
        samples = (self._get_sample(rank, now) for rank in range(self._run.world_size))
        return any(item is not None and item["state"] in ("stopped", "zombie", "gone") for item in samples)

    def _get_sample(self, rank: int, now: float) -> ProcessItem | None:
        """Return the sample of a rank's process after the last progress. Older samples say nothing."""
        item, last = self._processes.get_process(rank, now), self._progress.last_progress
        return item if item is not None and last is not None and item["time"] >= last else None

    def _is_saving(self) -> bool:
        items = self._progress.blocked.values()
        return any(item["phase"] == "checkpoint" or _is_in_stack(item["stack"], SAVING_FRAMES) for item in items)

    def detect(self, now: float, last: TracedStep | None) -> tuple[Hang, Finding] | None:
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
            blame = self._blame_checkpoint(deadlock)
        return self._make_finding(
            deadlock, blame, since, stalled_s, threshold if blame.cause != "checkpoint" else pace, now
        )

    def _get_pace_s(self) -> float:
        """Return the threshold of training itself."""
        if self._steps.median_s is None:
            return SLOW_S
        return max(MIN_THRESHOLD_S, min(PACES * self._steps.median_s, MAX_THRESHOLD_S), 2 * self._steps.longest_s)

    def _find_cause(self, deadlock: Deadlock | None, now: float) -> Blame:
        by_process = self._blame_process(deadlock, now)
        if by_process is not None:
            return by_process
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
        """Blame a process that is stopped, gone, or throttled."""
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
            reason = (
                f"A CPU quota throttles rank {throttled[0]} for {format_seconds(item['throttled'])} of each second."
            )
            return Blame("quota", tuple(throttled), reason)
        return None

    def _blame_silent_host(self, roots: Sequence[int], now: float) -> Blame | None:
        """Blame ranks of a silent host."""
        silent = tuple(
            rank
            for rank in roots
            if now - self._progress.last_contact.get(self._run.get_node(rank), now) > MAX_SILENCE_S and rank in roots
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
            return Blame(
                "unknown",
                ranks,
                f"No current operation is known for {format_ranks(ranks)}."
                if ranks
                else "No current operation is known.",
            )
        busy = f", using {item['cpu']:.2g} CPU cores" if item is not None else ""
        return Blame("compute", ranks, f"Code outside of collectives runs on {format_ranks(ranks)}{busy}.")

    def _blame_checkpoint(self, deadlock: Deadlock | None) -> Blame:
        items = self._progress.blocked.values()
        ranks = tuple(sorted(i["rank"] for i in items if _is_in_stack(i["stack"], SAVING_FRAMES)))
        roots = deadlock.roots if deadlock is not None and deadlock.kind == "missing" else ()
        return Blame("checkpoint", roots or ranks, "Training waits until the checkpoint is saved.")

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
    ) -> tuple[Hang, Finding]:
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
            ranks = at.group.ranks
            hang["group"] = {
                "axis": at.group.axis,
                "ranks": list(ranks[:MAX_NAMED_RANKS]),
                "size": len(ranks),
                "nth": at.group.nth,
            }
            number = f" {at.sequence:,}" if at.sequence is not None else ""
            call = f"{at.op}{number} on {at.group.axis} ({format_ranks(ranks)})"
        sentence = _make_sentence(blame, call, stalled_s, self._run, waiting)
        hang["text"] = truncate(f"{sentence} {blame.reason}")
        facts = [
            make_evidence(f"no progress on any rank for {format_seconds(stalled_s)}, in step {step + 1}", named_ranks)
        ]
        if waiting:
            facts.append(make_evidence(f"{format_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'}", waiting))
        if stack:
            facts.append(make_evidence(f"the innermost Python frame is {stack[-1]}", blame.ranks[:1]))
        item = self._get_sample(blame.ranks[0], now) if blame.ranks else None
        pid = item.get("pid", "PID") if item is not None else "PID"
        following = NEXT_STEPS[blame.cause].format(
            host=host or "the host", named=f"host {host}" if host else "the host", pid=pid
        )
        state = "notice" if blame.cause == "checkpoint" and stalled_s < CHECKPOINT_S else "hung"
        log_rank = min(blame.ranks, default=-1)
        action = "" if blame.cause == "stopped" else "open_log"  # the log of a stopped process has no reason
        return hang, Finding(state, 1.0, sentence, blame.reason, following, tuple(facts), action, log_rank)  # type: ignore[arg-type]

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
