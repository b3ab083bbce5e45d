"""Runs a case through a real host worker and supervisor, and judges what the diagnosis said of it and when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jobs.runs.diagnosis import HostRanks, VerdictPayload
from tests.cluster.cluster import cluster, why_not
from tests.cluster.jobs import endless
from tests.diagnosis import hands
from tests.diagnosis.cases import CASES, Case
from tests.diagnosis.watching import Watching
from tests.support.host import Host, run_host
from tests.support.processes import run_redis

HANG_S, SLOW_S = 10.0, 30.0  # within which it must be named: from the threshold, from the fault
PATIENCE_S = 75.0
AFTER = 30  # steps that a fault comes after
WARM_S = 8.0  # before what is done from outside: how fast links are is known by then
START_S = 240.0
JOB = f"tried-{os.getpid()}"  # a host reaps by a job's name, whoever else runs one
ALARMS = ("slow", "hung", "failed")


class Tried(NamedTuple):
    """What came of it; `right` is None where it could not be tried here. `seconds`: from the fault, or from the
    threshold of a standstill, to the word."""

    right: bool | None
    seconds: float | None
    said: str


def try_case(name: str, seed: int) -> Tried:
    case = CASES[name]
    try:
        return _on_two_hosts(case, seed) if case.hosts else _on_one_host(case, case.ranks(seed))
    except (AssertionError, OSError, subprocess.CalledProcessError) as error:  # the table goes on
        return Tried(False, None, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def one_host(folder: Path, **settings: str) -> Iterator[Host]:
    """A host whose trainer can go wrong."""
    folder.chmod(0o711)  # a job's user passes through
    with (
        run_redis(folder) as server,
        run_host(server, folder, "tests.diagnosis.faulty", **settings) as machine,
        machine.run_worker(),
    ):
        yield machine


def _on_one_host(case: Case, ranks: list[int]) -> Tried:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_temporary()))
        machine = stack.enter_context(one_host(folder))
        plan(machine, case.kind, list(range(case.world)) if case.everywhere else ranks, case.seconds)
        machine.send_launch_order(JOB, spec=case.spec())
        watching = Watching(machine.server.client(), JOB, case.spec())
        began = _reached(watching, AFTER, machine)
        if not case.does:
            return judge(case, ranks, watching, began)
        _warm(watching)
        if case.does == "kill":
            return _killed(machine, watching, ranks)
        pid = hands.rank_pid(machine.list_processes(JOB), ranks[0])
        done = {"stop": hands.stopped, "quota": hands.quota, "halting": hands.halting}[case.does]
        stack.enter_context(done(pid))
        return judge(case, ranks, watching, time.time())


def plan(machine: Host, kind: str, ranks: list[int], seconds: float) -> None:
    """What the trainer reads of its fault."""
    fault = {"kind": kind, "ranks": ranks, "after": AFTER, "seconds": seconds}
    (machine.data_root / "fault.json").write_text(json.dumps(fault))


def _reached(watching: Watching, step: int, machine: Host | None = None) -> float:
    """When so many steps were over.

    Raises:
        AssertionError: something was said to be wrong before, or it ended.
    """
    for told in watching.looks(START_S):
        if told["step"] >= step:
            return told["time"]
        _nothing_wrong(told)
        ends = [report["exit"] for report in machine.read_reports(JOB) if "exit" in report] if machine else []
        assert not ends, f"it ended before step {step}: {ends[0]['reason']}"
    raise AssertionError(f"it did not come to step {step} in {START_S:.0f} s: {told['sentence']}")


def _warm(watching: Watching) -> None:
    for told in watching.looks(WARM_S):
        _nothing_wrong(told)


def _nothing_wrong(told: VerdictPayload) -> None:
    assert not _alarms(told), f"before anything was done: {told['sentence']}; {told['reason']}"


def _alarms(told: VerdictPayload) -> bool:
    """Whether it says that something is wrong. That other work takes a rank's processors, which its kernel counts, is
    true of a machine that is not left alone."""
    return (told["state"] in ALARMS or told["hang"] is not None) and not _crowded(told)


def _crowded(told: VerdictPayload) -> bool:
    return (
        told["state"] == "slow"
        and told["hang"] is None
        and bool(told["stragglers"])
        and (told["stragglers"][0]["cause"] == "contention")
    )


def judge(case: Case, ranks: list[int], watching: Watching, began: float) -> Tried:
    """Listen until the right thing is said, or the wrong one, or nothing in time."""
    for told in watching.looks(PATIENCE_S):
        if not _alarms(told):
            continue
        cause, blamed, since = _blamed(told)
        took = told["time"] - (since if case.told == "hang" else began)
        right = cause in case.causes and set(blamed) == set(ranks) and all(host in told["next"] for host in case.hosts)
        in_time = took <= (HANG_S if case.told == "hang" else SLOW_S)
        said = f"[{cause} {blamed}] {told['sentence']}; {told['reason']}; next: {told['next']}"
        return Tried(right and in_time and (told["hang"] is not None) == (case.told == "hang"), took, said)
    told = watching.look()
    return Tried(False, None, f"nothing in {PATIENCE_S:.0f} s: {told['state']}, {told['sentence']}")


def _blamed(told: VerdictPayload) -> tuple[str, Sequence[int], float]:
    """(cause, ranks, since when it could be told) of what it says is wrong."""
    hang = told["hang"]
    if hang is not None:
        return hang["cause"], hang["ranks"], hang["since"] + hang["threshold_s"]
    if told["stragglers"]:
        late = told["stragglers"][0]
        return late["cause"], [late["rank"]], 0.0
    return "link" if told["sentence"].startswith("Slow link: ") else told["state"], [], 0.0


def _killed(machine: Host, watching: Watching, ranks: list[int]) -> Tried:
    began = time.time()
    os.kill(hands.rank_pid(machine.list_processes(JOB), ranks[0]), signal.SIGKILL)
    exit = machine.wait_for_exit(JOB)
    watching.read()
    watching.diagnosis.end(exit["outcome"], exit)
    told = watching.look()
    took = told["time"] - began
    right = told["state"] == "failed" and told["sentence"].startswith(f"Failed: rank {ranks[0]} ") and took <= SLOW_S
    return Tried(right, took, f"{told['sentence']}; {told['reason']}; next: {told['next']}")


def _on_two_hosts(case: Case, seed: int) -> Tried:
    """Ranks of tp on each, dp between them."""
    if problem := why_not():
        return Tried(None, None, problem)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_temporary()))
        made = stack.enter_context(cluster(folder, case.hosts, MESHBOARD_GROUP_TIMEOUT_S="300"))
        spec = endless("tried", case.layout, seq_len=64)
        job = made.submit(spec)
        made.wait_for(job, "running", timeout_s=START_S)
        told: list[dict[str, Any]] = made.job(job)["members"]
        members = [HostRanks(member["host"], member["first_rank"], member["num_ranks"]) for member in told]
        watching = Watching(made.board.redis.client(), job, spec, members)
        _reached(watching, AFTER)
        _warm(watching)
        one, other = (made.machines[member.host].cable for member in members)
        ends = (one, other)[case.drawn(seed, 2)]
        stack.enter_context(hands.cut(one, other) if case.does == "cut link" else hands.slow(ends))
        tried = judge(case, [], watching, time.time())
        made.cancel(job)
        return tried


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder:
        yield folder


def healthy(spec: dict[str, Any], seconds: float) -> Tried:
    """A run that nothing is done to: every word of it that something is wrong is a false alarm."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_temporary()))
        machine = stack.enter_context(one_host(folder))
        plan(machine, "", [], 0.0)
        machine.send_launch_order(JOB, spec=spec)
        watching = Watching(machine.server.client(), JOB, spec)
        try:
            _reached(watching, 1, machine)
        except AssertionError as error:
            return Tried(False, None, str(error))
        alarms: dict[str, int] = {}
        looks = crowded = 0
        for told in watching.looks(seconds):
            looks, crowded = looks + 1, crowded + _crowded(told)
            if _alarms(told):
                said = f"{told['sentence']} ({told['reason']})"
                alarms[said] = alarms.get(said, 0) + 1
        words = f"{looks} words, {crowded} of contention"
        said = f"{told['step']:,} steps, {told['sampled']} looked into, {words}; {told['sentence']}"
        if alarms:
            said = f"{sum(alarms.values())} of {looks} words alarm: {'; '.join(alarms)}"
        return Tried(not alarms, None, said)
