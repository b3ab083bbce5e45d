"""Counters of ranks that torchrun restarts."""

from __future__ import annotations

from contracts.telemetry.items import SCRIPT_SETUP_STEPS, Cell, PhaseItem, TrafficItem
from workers.external_runs.child_process import RestartCounter
from workers.meter.exporter import StartReporter
from workers.meter.recorder import Recorder

STEP_BYTES = 40


class Process:
    """A process of a rank, with the items of its meter."""

    def __init__(self, tries: RestartCounter) -> None:
        self._tries, self._recorder = tries, Recorder(0)
        StartReporter(0, tries.adjust).report("imported")

    def train(self, steps: int) -> tuple[int, list[Cell]]:
        """Run steps, and return the reported number of steps and the counters."""
        for step in range(steps):
            self._recorder.set_phase("step" if step >= SCRIPT_SETUP_STEPS else "setup")
            self._recorder.issue("all_reduce", "0", 2, STEP_BYTES)()
        told = PhaseItem(
            kind="phase", rank=0, time=0.0, phase="step", steps=steps, cells=self._recorder.get_cells("step")
        )
        traffic = TrafficItem(kind="traffic", rank=0, time=0.0, cells=self._recorder.get_cells(), dropped=0)
        for item in (told, traffic):
            self._tries.adjust(item)
        sent = [(cell["count"], cell["payload_bytes"]) for cell in traffic["cells"] if cell["phase"] == "step"]
        assert not sent or [(cell["count"], cell["payload_bytes"]) for cell in told["cells"]] == sent
        return told["steps"], traffic["cells"]


def test_counters_continue_after_restarts() -> None:
    tries = RestartCounter()
    Process(tries).train(6)
    assert Process(tries).train(1)[0] == 6, "its own first steps are set-up"
    steps, cells = Process(tries).train(4)
    counted = {cell["phase"]: (cell["count"], cell["completed"], cell["payload_bytes"]) for cell in cells}
    assert counted == {"setup": (5, 5, 5 * STEP_BYTES), "step": (6, 6, 6 * STEP_BYTES)}
    assert counted["step"][2] / (steps - SCRIPT_SETUP_STEPS) == STEP_BYTES


def test_restart_during_setup_counts_no_step_twice() -> None:
    tries = RestartCounter()
    Process(tries).train(1)
    assert Process(tries).train(3)[0] == 3
