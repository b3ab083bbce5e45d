"""Run scripts with and without faults through a host worker, several at once, and judge their verdicts."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from contracts.telemetry.batches import Batch
from jobs.runs.diagnosis import VerdictPayload
from tests.diagnosis.case_runner import CaseResult
from tests.diagnosis.monitor import POLL_S, DiagnosisMonitor
from tests.diagnosis.script_cases import FAULTS, HEALTHY, PRELUDE, WORLDS, ScriptFault
from tests.support.host import Host, run_host
from tests.support.processes import run_redis

MAX_NAMED_S = 10.0
TIMEOUT_S = 75.0  # from the fault
START_S = 300.0
ALARMS = ("slow", "hung", "failed")
FAULT = re.compile(r"FAULT (\d+\.\d+)")


class ScriptMonitor(DiagnosisMonitor):
    """Diagnosis of a script that prints when its fault begins."""

    fault_at: float | None = None
    ended = False

    def _add_batch(self, batch: Batch, node: int) -> None:
        for item in batch["items"]:
            if item["kind"] == "log" and self.fault_at is None:
                found = FAULT.search("\n".join(item["lines"]))
                self.fault_at = float(found[1]) if found else None
        super()._add_batch(batch, node)

    def look(self, machine: Host, job: str) -> VerdictPayload:
        """Return the verdict, which is final after the exit of the attempt."""
        self.read()
        if not self.ended:
            ends = [report["exit"] for report in machine.read_reports(job) if "exit" in report]
            if ends:
                self.read()
                self.diagnosis.end(ends[0]["outcome"], ends[0])
                self.ended = True
        return self.diagnosis.make_verdict(time.time())


class ScriptRun(NamedTuple):
    """A running script."""

    name: str
    job: str
    monitor: ScriptMonitor


@contextmanager
def open_host() -> Iterator[Host]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diagnosis-")))
        folder.chmod(0o711)
        server = stack.enter_context(run_redis(folder))
        machine = stack.enter_context(run_host(server, folder, MESHBOARD_SLOTS="64"))
        stack.enter_context(machine.run_worker())
        yield machine


def start_script(machine: Host, name: str, script: str, world: int, number: int) -> ScriptRun:
    """Start script `number`. The scripts of the next 16 numbers use other slots."""
    job, first_slot = f"script-{os.getpid()}-{number}", number % 16 * 4
    folder = machine.folder / "scripts" / job
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(PRELUDE + script)
    spec: dict[str, Any] = {"kind": "script", "layout": {"dp": world}, "train": {"global_batch": world}}
    spec |= {"script": {"path": f"{job}/script.py"}}
    machine.send_launch_order(job, spec=spec, first_slot=first_slot)
    return ScriptRun(name, job, ScriptMonitor(machine.server.client(), job, spec))


def describe(verdict: VerdictPayload) -> str:
    facts = "; ".join(fact["text"] for fact in verdict["evidence"])
    return f"{verdict['sentence']} {verdict['reason']} {verdict['next']} [{facts}]"


def is_named(case: ScriptFault, verdict: VerdictPayload) -> bool:
    return verdict["state"] in case.states and all(re.search(one, describe(verdict)) for one in case.expected)


def run_faults(names: Sequence[str], at_once: int = 4) -> Iterator[tuple[str, CaseResult]]:
    """Run scripts with faults, `at_once` at a time. An alarm before the fault is an error."""
    with open_host() as machine:
        for first in range(0, len(names), at_once):
            runs = {}
            for i, name in enumerate(names[first : first + at_once]):
                case = FAULTS[name]
                runs[name] = start_script(machine, name, case.script, case.world, first + i)
            yield from _judge_together(machine, runs)
            machine.kill_jobs()


def _judge_together(machine: Host, runs: dict[str, ScriptRun]) -> Iterator[tuple[str, CaseResult]]:
    pending, began = dict(runs), time.monotonic()
    while pending:
        round_began = time.monotonic()
        for name, run in list(pending.items()):
            result = _judge_once(machine, FAULTS[name], run, time.monotonic() - began)
            if result is not None:
                del pending[name]
                yield name, result
        time.sleep(max(0.0, POLL_S - (time.monotonic() - round_began)))


def _judge_once(machine: Host, case: ScriptFault, run: ScriptRun, passed_s: float) -> CaseResult | None:
    verdict = run.monitor.look(machine, run.job)
    fault_at = run.monitor.fault_at
    if fault_at is None:
        if verdict["state"] in ALARMS or passed_s > START_S:
            return CaseResult(False, None, f"before the fault: {describe(verdict)}")
        return None
    took = time.time() - fault_at
    if is_named(case, verdict):
        return CaseResult(took <= MAX_NAMED_S + (15 if case.states == ("failed",) else 0), took, describe(verdict))
    if took > TIMEOUT_S or (run.monitor.ended and verdict["state"] in ALARMS):
        return CaseResult(False, took, f"not named: {describe(verdict)}")
    return None


def run_healthy_scripts(names: Sequence[str], seconds: float) -> Iterator[tuple[str, CaseResult]]:
    """Run all healthy scripts at once, which makes the machine busy, and count alarms."""
    with open_host() as machine:
        runs = [start_script(machine, name, HEALTHY[name], WORLDS.get(name, 2), i) for i, name in enumerate(names)]
        looks: dict[str, int] = dict.fromkeys(names, 0)
        notices: dict[str, int] = dict.fromkeys(names, 0)
        alarms: dict[str, list[str]] = {name: [] for name in names}
        end, loads = time.monotonic() + seconds, []
        while time.monotonic() < end:
            round_began = time.monotonic()
            loads.append(os.getloadavg()[0])
            for run in runs:
                verdict = run.monitor.look(machine, run.job)
                looks[run.name] += 1
                notices[run.name] += verdict["state"] == "notice"
                if verdict["state"] in ALARMS:
                    alarms[run.name].append(describe(verdict))
            time.sleep(max(0.0, POLL_S - (time.monotonic() - round_began)))
        for run in runs:
            load = f"load {min(loads):.0f} to {max(loads):.0f}"
            verdict = run.monitor.look(machine, run.job)
            words = f"{looks[run.name]} looks in {seconds / 60:.0f} min, {notices[run.name]} notices, {load}"
            found = alarms[run.name]
            output = f"{words}; {len(found)} alarms {found[:1]}; {verdict['sentence']}"
            yield run.name, CaseResult(not found, None, output)
