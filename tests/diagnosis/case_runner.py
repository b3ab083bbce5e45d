"""Run a fault case through a real host worker and supervisor, and judge its diagnosis."""

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
from tests.cluster.cluster import cluster, get_missing_requirement
from tests.cluster.jobs import endless
from tests.diagnosis import disturbances
from tests.diagnosis.cases import CASES, FaultCase
from tests.diagnosis.monitor import DiagnosisMonitor
from tests.support.host import Host, run_host
from tests.support.processes import run_redis

HANG_S, SLOW_S = 10.0, 30.0  # timeout of the diagnosis: from the threshold, from the fault
VERDICT_TIMEOUT_S = 75.0
FIRST_FAULTY_STEP = 30  # number of steps before the fault
BASELINE_S = 8.0  # wait before a disturbance from outside, because the monitor first measures the links
START_S = 240.0
JOB = f"tried-{os.getpid()}"  # the host cleans up by job name, independent of the caller
ALARMS = ("slow", "hung", "failed")


class CaseResult(NamedTuple):
    """Result of a case. `right` is None if it cannot run here. `seconds` are those from the fault to the diagnosis."""

    right: bool | None
    seconds: float | None
    said: str


def run_case(name: str, seed: int) -> CaseResult:
    case = CASES[name]
    try:
        return _run_on_two_hosts(case, seed) if case.hosts else _run_on_one_host(case, case.ranks(seed))
    except (AssertionError, OSError, subprocess.CalledProcessError) as error:  # the table continues after this error
        return CaseResult(False, None, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def run_faulty_host(folder: Path, **settings: str) -> Iterator[Host]:
    """Run a host whose trainer has faults."""
    folder.chmod(0o711)  # a job's user passes through
    with (
        run_redis(folder) as server,
        run_host(server, folder, "tests.diagnosis.faulty", **settings) as machine,
        machine.run_worker(),
    ):
        yield machine


def _run_on_one_host(case: FaultCase, ranks: list[int]) -> CaseResult:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_open_folder()))
        machine = stack.enter_context(run_faulty_host(folder))
        write_fault(machine, case.kind, list(range(case.world)) if case.everywhere else ranks, case.seconds)
        machine.send_launch_order(JOB, spec=case.spec())
        watching = DiagnosisMonitor(machine.server.client(), JOB, case.spec())
        began = _wait_for_step(watching, FIRST_FAULTY_STEP, machine)
        if not case.does:
            return judge(case, ranks, watching, began)
        _wait_for_baseline(watching)
        if case.does == "kill":
            return _kill_rank(machine, watching, ranks)
        pid = disturbances.find_rank_pid(machine.list_processes(JOB), ranks[0])
        done = {
            "stop": disturbances.stop_process,
            "quota": disturbances.limit_cpu,
            "halting": disturbances.stop_repeatedly,
        }[case.does]
        stack.enter_context(done(pid))
        return judge(case, ranks, watching, time.time())


def write_fault(machine: Host, kind: str, ranks: list[int], seconds: float) -> None:
    """Write the fault that the trainer reads."""
    fault = {"kind": kind, "ranks": ranks, "after": FIRST_FAULTY_STEP, "seconds": seconds}
    (machine.data_root / "fault.json").write_text(json.dumps(fault))


def _wait_for_step(watching: DiagnosisMonitor, step: int, machine: Host | None = None) -> float:
    """Return the time when a step has ended.

    Raises:
        AssertionError: An alarm came before the fault, or the run ended.
    """
    for result in watching.diagnose_repeatedly(START_S):
        if result["step"] >= step:
            return result["time"]
        _has_no_alarm(result)
        ends = [report["exit"] for report in machine.read_reports(JOB) if "exit" in report] if machine else []
        assert not ends, f"it ended before step {step}: {ends[0]['reason']}"
    raise AssertionError(f"it did not come to step {step} in {START_S:.0f} s: {result['sentence']}")


def _wait_for_baseline(watching: DiagnosisMonitor) -> None:
    for result in watching.diagnose_repeatedly(BASELINE_S):
        _has_no_alarm(result)


def _has_no_alarm(verdict: VerdictPayload) -> None:
    assert not _is_alarm(verdict), f"before the fault: {verdict['sentence']}; {verdict['reason']}"


def _is_alarm(verdict: VerdictPayload) -> bool:
    """Return True for an alarm. Other work on a rank's CPU, which its kernel counts, is none on a shared machine."""
    waits_for_checkpoint = verdict["hang"] is not None and verdict["hang"]["cause"] == "checkpoint"
    return (verdict["state"] in ALARMS or waits_for_checkpoint) and not _is_crowded(verdict)


def _is_crowded(verdict: VerdictPayload) -> bool:
    return (
        verdict["state"] == "slow"
        and verdict["hang"] is None
        and bool(verdict["stragglers"])
        and (verdict["stragglers"][0]["cause"] == "contention")
    )


def judge(case: FaultCase, ranks: list[int], watching: DiagnosisMonitor, began: float) -> CaseResult:
    """Wait for the right diagnosis, a wrong one, or the timeout."""
    for result in watching.diagnose_repeatedly(VERDICT_TIMEOUT_S):
        if not _is_alarm(result):
            continue
        cause, blamed, since = _get_blamed_ranks(result)
        took = result["time"] - (since if case.alarm == "hang" else began)
        right = (
            cause in case.causes and set(blamed) == set(ranks) and all(host in result["next"] for host in case.hosts)
        )
        in_time = took <= (HANG_S if case.alarm == "hang" else SLOW_S)
        output = f"[{cause} {blamed}] {result['sentence']}; {result['reason']}; next: {result['next']}"
        return CaseResult(right and in_time and (result["hang"] is not None) == (case.alarm == "hang"), took, output)
    result = watching.diagnose()
    return CaseResult(False, None, f"nothing in {VERDICT_TIMEOUT_S:.0f} s: {result['state']}, {result['sentence']}")


def _get_blamed_ranks(verdict: VerdictPayload) -> tuple[str, Sequence[int], float]:
    """Return the cause and ranks of an alarm, and the time since when it was visible."""
    hang = verdict["hang"]
    if hang is not None:
        return hang["cause"], hang["ranks"], hang["since"] + hang["threshold_s"]
    if verdict["stragglers"]:
        late = verdict["stragglers"][0]
        return late["cause"], [late["rank"]], 0.0
    return "link" if verdict["sentence"].startswith("Slow link: ") else verdict["state"], [], 0.0


def _kill_rank(machine: Host, watching: DiagnosisMonitor, ranks: list[int]) -> CaseResult:
    began = time.time()
    os.kill(disturbances.find_rank_pid(machine.list_processes(JOB), ranks[0]), signal.SIGKILL)
    exit = machine.wait_for_exit(JOB)
    watching.read()
    watching.diagnosis.end(exit["outcome"], exit)
    result = watching.diagnose()
    took = result["time"] - began
    right = (
        result["state"] == "failed" and result["sentence"].startswith(f"Failed: rank {ranks[0]} ") and took <= SLOW_S
    )
    return CaseResult(right, took, f"{result['sentence']}; {result['reason']}; next: {result['next']}")


def _run_on_two_hosts(case: FaultCase, seed: int) -> CaseResult:
    """Run TP ranks on each host, with DP between hosts."""
    if problem := get_missing_requirement():
        return CaseResult(None, None, problem)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_open_folder()))
        made = stack.enter_context(cluster(folder, case.hosts, MESHBOARD_GROUP_TIMEOUT_S="300"))
        spec = endless("tried", case.layout, seq_len=64)
        job = made.submit(spec)
        made.wait_for(job, "running", timeout_s=START_S)
        result: list[dict[str, Any]] = made.job(job)["members"]
        members = [HostRanks(member["host"], member["first_rank"], member["num_ranks"]) for member in result]
        watching = DiagnosisMonitor(made.board.redis.client(), job, spec, members)
        _wait_for_step(watching, FIRST_FAULTY_STEP)
        _wait_for_baseline(watching)
        one, other = (made.machines[member.host].cable for member in members)
        ends = (one, other)[case.draw(seed, 2)]
        stack.enter_context(
            disturbances.cut_link(one, other) if case.does == "cut link" else disturbances.slow_down_link(ends)
        )
        tried = judge(case, [], watching, time.time())
        made.cancel(job)
        return tried


@contextlib.contextmanager
def _open_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder:
        yield folder


def run_healthy(spec: dict[str, Any], seconds: float) -> CaseResult:
    """Run a spec without faults, in which each alarm is false."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_open_folder()))
        machine = stack.enter_context(run_faulty_host(folder))
        write_fault(machine, "", [], 0.0)
        machine.send_launch_order(JOB, spec=spec)
        watching = DiagnosisMonitor(machine.server.client(), JOB, spec)
        try:
            _wait_for_step(watching, 1, machine)
        except AssertionError as error:
            return CaseResult(False, None, str(error))
        alarms: dict[str, int] = {}
        looks = crowded = 0
        for result in watching.diagnose_repeatedly(seconds):
            looks, crowded = looks + 1, crowded + _is_crowded(result)
            if _is_alarm(result):
                output = f"{result['sentence']} ({result['reason']})"
                alarms[output] = alarms.get(output, 0) + 1
        words = f"{looks} words, {crowded} of contention"
        output = f"{result['step']:,} steps, {result['sampled']} looked into, {words}; {result['sentence']}"
        if alarms:
            output = f"{sum(alarms.values())} of {looks} words alarm: {'; '.join(alarms)}"
        return CaseResult(not alarms, None, output)
