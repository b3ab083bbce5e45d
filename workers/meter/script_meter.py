"""Meter this process as one rank of a script: its groups, its steps, and the reports to the supervisor."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import parent_process
from types import ModuleType
from typing import NamedTuple

import torch.distributed as dist

from contracts.telemetry.items import PhaseItem
from workers.meter.exporter import Exporter, StartReporter
from workers.meter.marks import register_marks
from workers.meter.metric_calls import capture_metrics
from workers.meter.monitors import PeakMonitor
from workers.meter.recorder import Recorder
from workers.meter.script_groups import patch_group_creation
from workers.meter.script_steps import StepTracker
from workers.meter.training_hooks import install_hooks
from workers.metric_values import MetricCollector

CLOSE_PRIORITY = 100  # before multiprocessing ends the child processes of this process


class ScriptMeter(NamedTuple):
    """Meter of this process. `exporter` is None if no supervisor receives its items."""

    recorder: Recorder
    exporter: Exporter | None
    marks: ModuleType


def start_meter(
    rank: int,
    telemetry: str | None,
    job: str = "local",
    attempt: int = 1,
    *,
    world_size: int | None = None,
    local_ranks: int | None = None,
    print_table: Callable[[Recorder], None] | None = None,
) -> ScriptMeter:
    """Meter all groups and steps from now on.

    Args:
        telemetry: socket of the supervisor.
        world_size: number of ranks, if the supervisor does not know it.
        local_ranks: number of ranks on this machine, if its launcher reports it.
        print_table: called at the exit of a process without a supervisor.
    """
    recorder = Recorder(rank)
    # Set for a run with a prediction: the label of groups with all ranks in the prediction.
    predicted_label = os.environ.get("MESHBOARD_COMPARE", "")
    exporter = Exporter(recorder, telemetry, job, attempt) if telemetry else None
    start = StartReporter(rank, exporter.send if exporter else lambda _item: None, world_size, local_ranks)
    start.report("imported")
    sets_own_rank = exporter is None and not os.environ.get("RANK")

    def on_group(group: dist.ProcessGroup) -> None:
        start.report("met")
        if sets_own_rank and not dist.is_initialized():
            recorder.rank = group.rank()

    patch_group_creation(recorder, predicted_label or "world", on_group)
    tracker = StepTracker(recorder, exporter.send if exporter else None, lambda: start.report("first step"))
    install_hooks(tracker)
    metrics = MetricCollector(rank, local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE") or 1)) if exporter else None
    marks = register_marks(tracker, metrics)
    if exporter is not None and metrics is not None:
        capture_metrics(metrics, lambda: recorder.step)
        exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
        _call_at_exit(exporter.close)
        exporter.add_source(tracker.poll)
        exporter.add_source(partial(_send_metrics, metrics, exporter))
        exporter.add_source(PeakMonitor(rank).poll)
        recorder.begin_step(1)
    elif print_table is not None:
        _call_at_exit(partial(print_table, recorder))
    _call_at_exit(tracker.close)  # runs before `exporter.close`
    return ScriptMeter(recorder, exporter, marks)


def _send_metrics(metrics: MetricCollector, exporter: Exporter) -> None:
    for item in metrics.take(final=exporter.is_closing):
        exporter.send(item)


def _call_at_exit(function: Callable[[], object]) -> None:
    """Call a function at the exit of this process. A forked process skips the functions of `atexit`."""
    if parent_process() is None:
        atexit.register(function)
    else:
        multiprocessing.util.Finalize(None, function, exitpriority=CLOSE_PRIORITY)
