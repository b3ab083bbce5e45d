"""Describe hangs in words: what each rank does, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.telemetry.items import StallItem
from jobs.core.verdict_schema import Cause
from jobs.runs.diagnosis.deadlocks import RENDEZVOUS, Deadlock, format_group, get_place, parse_group
from jobs.runs.diagnosis.findings import format_ranks
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_activity import Kind
from jobs.runs.diagnosis.traced_step import ProcessGroup

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
LEFT_NEXT = "Let every rank run the same number of steps and collectives."
# Work of a rank, after "rank 1 " and before " in train.py:12".
DOINGS: dict[Kind, str] = {
    "file": "waits for a file or a disk",
    "lock": "waits for a lock, a thread, or a process",
    "input": "waits for input",
    "idle": "sleeps",
    "busy": "still computes",
    "crowded": "still computes",
    "evaluation": "still evaluates",
    "compile": "still compiles",
    "import": "still imports modules",
    "network": "waits for the network or another process",
    "data": "loads training data",
    "checkpoint": "saves a checkpoint",
}


def get_mismatch_step(calls: Mapping[int, str]) -> str:
    """Return the next step for calls that differ, by rank: in the operation, or in size or dtype."""
    if len({call.partition(" ")[0] for call in calls.values()}) > 1:
        return "Find the code branch in which ranks call different operations."
    return NEXT_STEPS["mismatch"]


def describe_side(item: StallItem) -> str:
    """Return "in all_reduce of 64 float32 (call 66 on world), at train.py:12: `loss.backward()`"."""
    in_flight = [one for one in item["groups"] if "op" in one]
    place, source = get_place(item["stack"]), item.get("source", "")
    at = f"at {place}{f': `{source}`' if source else ''}" if place else ""
    if not in_flight:
        return at
    one = min(in_flight, key=lambda one: (not one.get("blocking", False), one.get("since", 0.0)))
    number = one.get("sequence", one["ended"] + 1)
    return f"in {one.get('call', one['op'])} (call {number:,} on {format_group(parse_group(one))})" + (
        f", {at}" if at else ""
    )


def describe_calls(group: ProcessGroup, sequence: int, calls: Mapping[int, str], odd: Sequence[int]) -> str:
    """Return "In call 43 on world, rank 1 calls barrier, but rank 0 calls all_reduce of 64 float32."."""
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    sides = sorted(by_call.items(), key=lambda side: not set(side[1]) & set(odd))
    texts = [conjugate(format_ranks(ranks), f"calls {call}", len(ranks)) for call, ranks in sides]
    return f"In call {sequence:,} on {format_group(group)}, {texts[0]}, but {' and '.join(texts[1:3])}."


def conjugate(who: str, doing: str, number: int) -> str:
    """Return "rank 1 waits for input" or "ranks 1 and 2 wait for input"."""
    if number == 1:
        return f"{who} {doing}"
    words = doing.split(" ")
    index = 1 if words[0] == "still" else 0
    words[index] = words[index].removesuffix("s")
    return f"{who} {' '.join(words)}"


def describe_stuck_ranks(
    cause: Cause, blamed: Sequence[int], deadlock: Deadlock | None, run: PlannedRun, waiting: Sequence[int]
) -> str:
    """Return "ranks 0 and 2 wait for rank 1, which did not enter all_reduce 41 on dp (ranks 0 and 1)"."""
    # The operation of a mismatch is different on each side.
    call = format_call(deadlock, names_operation=cause != "mismatch") if deadlock is not None else ""
    if not blamed:
        return f"the collective {call} does not complete" if call else "all ranks are stuck"
    subject = run.format_rank(blamed[0]) if len(blamed) == 1 else format_ranks(blamed)
    if not call:
        return f"{subject} {'is' if len(blamed) == 1 else 'are'} stuck"
    if cause == "mismatch":
        return f"{subject} entered {call} with another operation or size"
    if waiting:
        verb = "wait" if len(waiting) > 1 else "waits"
        return f"{format_ranks(waiting)} {verb} for {subject}, which did not enter {call}"
    return f"{subject} did not enter {call}"


def format_call(deadlock: Deadlock, *, names_operation: bool = True) -> str:
    """Return "all_reduce 41 on dp (ranks 0 and 1)", or "call 41 on dp (ranks 0 and 1)"."""
    at = deadlock.at
    if at.op == RENDEZVOUS:
        return f"`{at.call}`"
    number = f" {at.sequence:,}" if at.sequence is not None else ""
    operation = at.op if names_operation else "call"
    return f"{operation}{number} on {format_group(at.group)} ({format_ranks(at.group.ranks)})"
