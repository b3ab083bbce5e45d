"""Nothing ends any more: since when, in which collective, whose fault, and what to do.

A run stands still when on no rank anything ended for its threshold, while its hosts still speak. The threshold is the
run's own pace: PACES times its median step, 10 s at least and 60 s at most, and no less than twice its longest step of
late. What is slow by nature has more: the way to the first steps, a proof and what is compiled SLOW_S; a validation
EVAL_S, a checkpoint CHECKPOINT_S or twice the longest before where that is more. A process that its host sees stopped
or gone explains a standstill at once: LEAST_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contracts.telemetry.health import ProcessItem
from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.core.verdict_schema import MOST_LINE, MOST_RANKS, MOST_STACK, Cause, Hang
from jobs.runs.diagnosis.course.steps import Steps
from jobs.runs.diagnosis.events.step import Step
from jobs.runs.diagnosis.findings import Finding, capital, cut, evidence, ranks_words, seconds
from jobs.runs.diagnosis.run import Run
from jobs.runs.diagnosis.stuck.processes import THROTTLED, Processes
from jobs.runs.diagnosis.stuck.progress import Progress
from jobs.runs.diagnosis.stuck.standstill import Knot, untie

LEAST_S, MOST_S, PACES = 10.0, 60.0, 10.0
SLOW_S, EVAL_S, CHECKPOINT_S = 300.0, 60.0, 120.0
UNTOLD_S = 5.0  # beyond the threshold, for ranks that others wait for to tell where they stand
SPEAKS_S = 8.0  # a host that told nothing for longer is silent: gauges come every few seconds
LOADING = ("dataload", "corpus", "dataset", "next_batch", "tokenize", "fetch")
SAVING = ("workers/checkpoint", "distributed/checkpoint", "torch/serialization", "save_checkpoint")
EVALUATING = ("evaluate", "validate")
NEXT: dict[str, str] = {
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
    cause: Cause
    ranks: tuple[int, ...]
    reason: str


class Hangs:
    """Whether the run stands still."""

    def __init__(self, run: Run, steps: Steps, progress: Progress, processes: Processes) -> None:
        self._run, self._steps, self._progress, self._processes = run, steps, progress, processes

    def threshold_s(self, now: float) -> float:
        """Seconds after which a standstill is told, by what the run does."""
        if self._held(now):
            return LEAST_S
        phases = set(self._progress.phases.values())
        if self._steps.ran <= WARMUP_STEPS or self._steps.median_s is None or phases & {"setup", "proof"}:
            return SLOW_S
        if phases == {"teardown"}:
            return SLOW_S
        pace = max(LEAST_S, min(PACES * self._steps.median_s, MOST_S), 2 * self._steps.longest_s)
        if self._saving():
            return max(pace, CHECKPOINT_S, 2 * self._steps.longest_save_s)
        return max(pace, EVAL_S) if "eval" in phases else pace

    def _held(self, now: float) -> bool:
        told = (self._seen(rank, now) for rank in range(self._run.world_size))
        return any(item is not None and item["state"] in ("stopped", "zombie", "gone") for item in told)

    def _seen(self, rank: int, now: float) -> ProcessItem | None:
        """What its host sees of its process since anything last ended: what was seen before says nothing of now."""
        item, last = self._processes.of(rank, now), self._progress.last
        return item if item is not None and last is not None and item["time"] >= last else None

    def _saving(self) -> bool:
        items = self._progress.standing.values()
        return any(item["phase"] == "checkpoint" or _stands_in(item["stack"], SAVING) for item in items)

    def look(self, now: float, last: Step | None) -> tuple[Hang, Finding] | None:
        """`last`: the newest step that is known event by event."""
        since, told = self._progress.last, self._progress.told
        if since is None or told is None:
            return None
        still, threshold = now - since, self.threshold_s(now)
        pace = min(threshold, self._pace_s())
        if still < pace or now - told > SPEAKS_S:  # nobody speaks: it is the way to the board that is broken
            return None
        saving = self._saving()
        if still < threshold and not saving:
            return None
        knot = untie(self._progress.standing, self._run.world_size, last)
        blame = self._blame(knot, now)
        if blame.cause == "unknown" and blame.ranks and still < threshold + UNTOLD_S:
            return None
        if saving and blame.cause in ("compute", "unknown"):
            blame = self._saves(knot)
        return self._told(knot, blame, since, still, threshold if blame.cause != "checkpoint" else pace, now)

    def _pace_s(self) -> float:
        """The threshold of training itself."""
        if self._steps.median_s is None:
            return SLOW_S
        return max(LEAST_S, min(PACES * self._steps.median_s, MOST_S), 2 * self._steps.longest_s)

    def _blame(self, knot: Knot | None, now: float) -> Blame:
        by_process = self._by_process(knot, now)
        if by_process is not None:
            return by_process
        if knot is None:
            return self._own_code(tuple(sorted(self._progress.standing)), now)
        if knot.kind == "missing":
            return self._silent(knot.roots, now) or self._own_code(knot.roots, now)
        if knot.kind == "skipped":
            who = capital(ranks_words(knot.roots))
            reason = f"{who} skipped a collective or called an extra one, so the ranks wait in different collectives."
            return Blame("skipped call", knot.roots, reason)
        if knot.kind == "mismatch":
            return Blame("mismatch", knot.roots, "The operation or size of the collective differs between ranks.")
        return Blame(
            "link", (), "All ranks of the group have entered the collective, but the transfer does not complete."
        )

    def _by_process(self, knot: Knot | None, now: float) -> Blame | None:
        """A process that is stopped or gone explains everything, whoever it makes wait."""
        found = {rank: self._seen(rank, now) for rank in range(self._run.world_size)}
        for states, cause, words in (
            (("stopped",), "stopped", ("The process of {} is stopped.", "The processes of {} are stopped.")),
            (("zombie", "gone"), "dead", ("The process of {} has ended.", "The processes of {} have ended.")),
        ):
            ranks = tuple(rank for rank, item in found.items() if item is not None and item["state"] in states)
            if ranks:
                return Blame(cause, ranks, words[len(ranks) > 1].format(ranks_words(ranks)))  # type: ignore[arg-type]
        roots = knot.roots if knot is not None and knot.kind == "missing" else ()
        held = [rank for rank in roots if (item := found[rank]) is not None and item["throttled"] >= THROTTLED]
        if held:
            item = found[held[0]]
            assert item is not None
            kept = f"A CPU quota throttles rank {held[0]} for {seconds(item['throttled'])} of each second."
            return Blame("quota", tuple(held), kept)
        return None

    def _silent(self, roots: Sequence[int], now: float) -> Blame | None:
        """Ranks of a host of which nothing is heard any more, while others speak."""
        quiet = tuple(
            rank
            for rank in roots
            if now - self._progress.heard.get(self._run.member_of(rank), now) > SPEAKS_S and rank in roots
        )
        if not quiet:
            return None
        return Blame("link", quiet, f"Meshboard has lost contact with {self._run.host_of(quiet[0]) or 'its host'}.")

    def _own_code(self, ranks: tuple[int, ...], now: float) -> Blame:
        """Ranks that are in no collective: what they do instead, by where their Python stands."""
        stack = self._stack(ranks[:1], now)
        item = self._seen(ranks[0], now) if ranks else None
        if _stands_in(stack, SAVING):
            return Blame("checkpoint", ranks, f"A checkpoint is being saved on {ranks_words(ranks)}.")
        if _stands_in(stack, LOADING):
            return Blame("data", ranks, f"Training data is being loaded on {ranks_words(ranks)}.")
        if not any(rank in self._progress.standing or self._seen(rank, now) for rank in ranks):
            return Blame(
                "unknown",
                ranks,
                f"No current operation is known for {ranks_words(ranks)}."
                if ranks
                else "No current operation is known.",
            )
        busy = f", using {item['cpu']:.2g} CPU cores" if item is not None else ""
        return Blame("compute", ranks, f"Code outside of collectives runs on {ranks_words(ranks)}{busy}.")

    def _saves(self, knot: Knot | None) -> Blame:
        items = self._progress.standing.values()
        ranks = tuple(sorted(i["rank"] for i in items if _stands_in(i["stack"], SAVING)))
        roots = knot.roots if knot is not None and knot.kind == "missing" else ()
        return Blame("checkpoint", roots or ranks, "Training waits until the checkpoint is saved.")

    def _stack(self, ranks: Sequence[int], now: float) -> list[str]:
        for rank in ranks:
            standing, process = self._progress.standing.get(rank), self._seen(rank, now)
            if process is not None and process["stack"]:
                return process["stack"]
            if standing is not None and standing["stack"]:
                return standing["stack"]
        return []

    def _told(
        self, knot: Knot | None, blame: Blame, since: float, still: float, threshold: float, now: float
    ) -> tuple[Hang, Finding]:
        at = knot.at if knot is not None else None
        waiting = [rank for rank in (knot.waiting if knot is not None else ()) if rank not in blame.ranks]
        stack = self._stack(blame.ranks[:1] or (at.rank,) if at is not None else blame.ranks[:1], now)
        named = blame.ranks or (at.group.ranks if at is not None else ())
        host = self._hosts(named)
        step = max((item["step"] for item in self._progress.standing.values()), default=self._steps.last)
        hang: Hang = {
            "cause": blame.cause,
            "since": since,
            "still_s": still,
            "threshold_s": threshold,
            "step": step,
            "ranks": list(blame.ranks[:MOST_RANKS]),
            "host": host,
            "waiting": waiting[:MOST_RANKS],
            "num_waiting": len(waiting),
            "group": None,
            "op": at.op if at is not None else "",
            "sequence": at.sequence if at is not None else None,
            "stack": [line[-MOST_LINE:] for line in stack[-MOST_STACK:]],
            "text": "",
        }
        call = ""
        if at is not None:
            ranks = at.group.ranks
            hang["group"] = {
                "axis": at.group.axis,
                "ranks": list(ranks[:MOST_RANKS]),
                "size": len(ranks),
                "nth": at.group.nth,
            }
            number = f" {at.sequence:,}" if at.sequence is not None else ""
            call = f"{at.op}{number} on {at.group.axis} ({ranks_words(ranks)})"
        sentence = _sentence(blame, call, still, self._run, waiting)
        hang["text"] = cut(f"{sentence} {blame.reason}")
        facts = [evidence(f"no progress on any rank for {seconds(still)}, in step {step + 1}", named)]
        if waiting:
            facts.append(evidence(f"{ranks_words(waiting)} {'wait' if len(waiting) > 1 else 'waits'}", waiting))
        if stack:
            facts.append(evidence(f"the innermost Python frame is {stack[-1]}", blame.ranks[:1]))
        item = self._seen(blame.ranks[0], now) if blame.ranks else None
        pid = item.get("pid", "PID") if item is not None else "PID"
        following = NEXT[blame.cause].format(
            host=host or "the host", named=f"host {host}" if host else "the host", pid=pid
        )
        state = "notice" if blame.cause == "checkpoint" and still < CHECKPOINT_S else "hung"
        log_rank = min(blame.ranks, default=-1)
        action = "" if blame.cause == "stopped" else "open_log"  # the log of a stopped process has no reason
        return hang, Finding(state, 1.0, sentence, blame.reason, following, tuple(facts), action, log_rank)  # type: ignore[arg-type]

    def _hosts(self, ranks: Sequence[int]) -> str:
        """'host-a', or 'host-a and host-b' where ranks are on several."""
        hosts = list(dict.fromkeys(host for rank in ranks if (host := self._run.host_of(rank))))
        return hosts[0] if len(hosts) == 1 else " and ".join((", ".join(hosts[:-1]), hosts[-1])) if hosts else ""


def _stands_in(stack: Sequence[str], words: Sequence[str]) -> bool:
    return any(word in line.lower() for line in stack for word in words)


def _sentence(blame: Blame, call: str, still: float, run: Run, waiting: Sequence[int]) -> str:
    if blame.cause == "checkpoint":
        where = f" on {ranks_words(blame.ranks)}" if blame.ranks else ""
        return f"Stalled: training has waited {seconds(still)} for a checkpoint{where}."
    return f"Stalled: no progress for {seconds(still)}. {capital(_stuck(blame, call, run, waiting))}."


def _stuck(blame: Blame, call: str, run: Run, waiting: Sequence[int]) -> str:
    if not blame.ranks:
        return f"the collective {call} does not complete" if call else "all ranks are stuck"
    who = run.where(blame.ranks[0]) if len(blame.ranks) == 1 else ranks_words(blame.ranks)
    if not call:
        return f"{who} {'is' if len(blame.ranks) == 1 else 'are'} stuck"
    if blame.cause == "mismatch":
        return f"{who} entered {call} with another operation or size"
    if waiting:
        return f"{ranks_words(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {who}, which did not enter {call}"
    return f"{who} did not enter {call}"
