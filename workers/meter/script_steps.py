"""Time the steps of a script, and report them.

A step lasts from one mark to the next. The mark with the highest priority delimits the steps: `meshboard.step()`, then
the end of `optimizer.step`, then `torch.profiler.profile.step`. A script without any mark has no steps.

The training thread only takes times and copies counters. The thread of the exporter builds the items. Steps that are
shorter than MIN_ITEM_PERIOD_S share an item, so the work per step of a script that floods steps stays small.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from contracts.fields import MAX_ABS_NUMBER
from contracts.telemetry.batches import Item
from contracts.telemetry.items import (
    MAX_LISTED_STEPS,
    SCRIPT_SETUP_STEPS,
    WARMUP_STEPS,
    PhaseItem,
    StepBreakdown,
    StepItem,
    Work,
)
from workers.meter import step_clock
from workers.meter.collectives import DetachedTimes
from workers.meter.recorder import CellCounters, Recorder, build_cell
from workers.meter.step_clock import Moment, compute_seconds

MIN_ITEM_PERIOD_S = 0.05
MAX_ITEMS_PER_S = 400  # of all ranks of a host
MAX_PENDING_STEPS = 1000  # that wait for the device or the exporter
MAX_DEVICE_SPANS = 16  # per step and kind of work; more are not timed, because each needs two events
# Marks by priority. Once a mark of a higher priority was seen, lower ones are ignored.
PROFILER, OPTIMIZER, EXPLICIT = 1, 2, 3

Begin = float | Moment | None  # on the host in seconds, on a device, or not timed
DeviceSpans = dict[Work, list[tuple[Moment, Moment]]]


@dataclass(slots=True)
class StepValues:
    """Values of the steps that the next item covers."""

    untimed: set[Work]  # work without a time
    timed: set[Work] = field(default_factory=set)
    spans: DeviceSpans = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # of each short step, on the host
    gap_s: float = 0.0  # between explicit steps
    dataset: int | None = None
    samples: int | None = None
    has_unknown_samples: bool = False
    explicit_samples: int | None = None
    tokens: int | None = None

    def add_samples(self, dataset: int, samples: int | None) -> None:
        """Add a batch of all ranks. Batches of several datasets, or of an unknown size, make the number unknown."""
        if samples is None or self.dataset not in (None, dataset):
            self.has_unknown_samples = True
            return
        self.dataset = dataset
        self.samples = (self.samples or 0) + samples

    def get_samples(self) -> int | None:
        if self.explicit_samples is not None:
            return self.explicit_samples
        return None if self.has_unknown_samples else self.samples


class EndedStep(NamedTuple):
    """A step that ended, or several short ones. It is reported when its device has passed its end."""

    step: int
    num_steps: int
    begin: Moment
    end: Moment
    unix_s: float
    times: DetachedTimes
    counters: CellCounters
    values: StepValues
    learning_rate: float | None


class StepTracker:
    """Delimit the steps of a script, and send an item for each of them."""

    def __init__(
        self,
        recorder: Recorder,
        send: Callable[[Item], None] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` is None if no supervisor receives items. `on_step` is called at the end of each reported step."""
        self._recorder, self._send, self._on_step = recorder, send, on_step
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        self._period_s = max(MIN_ITEM_PERIOD_S, local_ranks / MAX_ITEMS_PER_S)
        self._priority = 0
        self._begin: Moment | None = None  # of the steps that the next item covers, None before the first mark
        self._last_step = 0  # of the last item
        self._mask = 0  # an item covers mask + 1 steps
        self._next_due_s = 0.0
        self._step_began_s = 0.0  # begin of the current step, which is the last mark except after a gap
        self.is_sampled = True  # the first step of an item, which is traced and has the time of its optimizers
        self._pending: deque[EndedStep] = deque(maxlen=MAX_PENDING_STEPS)
        self._untimed_step = self._reported_step = 0
        self._gap_began_s = 0.0  # end of the last explicit step
        self._is_open = False  # an explicit step
        self._never_timed: set[Work] = set()
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._values = StepValues(set(self._never_timed))

    # Marks. They are called on the training thread.

    def mark(self, priority: int) -> None:
        """End the current step, and begin the next one."""
        if priority < self._priority:
            return
        if priority > self._priority:
            self._take_over(priority)
        recorder = self._recorder
        recorder.step = step = recorder.step + 1
        if (step + 1) & self._mask:
            now_s = time.perf_counter()
            if now_s < self._next_due_s:
                if self.is_sampled:
                    self.is_sampled = False
                    recorder.end_trace()
                if self._mask < MAX_LISTED_STEPS:
                    self._values.times.append(now_s - self._step_began_s)
                self._step_began_s = recorder.last_progress_s = now_s
                recorder.completed_steps = step
                return
        end = step_clock.now()
        if self._mask:
            self._values.times.append(end.host_s - self._step_began_s)
        self._end_item(step, end)

    def begin_explicit(self, *, tokens: int | None = None, samples: int | None = None) -> None:
        """Begin an explicit step. An explicit step that is still open ends here."""
        if self._is_open:
            self.mark(EXPLICIT)
        else:
            self._begin_after_gap()
        self._is_open = True
        values = self._values
        if samples is not None:
            values.explicit_samples = (values.explicit_samples or 0) + samples
        if tokens is not None:
            values.tokens = (values.tokens or 0) + tokens

    def end_explicit(self) -> None:
        """End an explicit step. The time until the next one belongs to no step."""
        if self._is_open:
            self.mark(EXPLICIT)
            self._is_open, self._gap_began_s = False, time.perf_counter()

    def abandon_explicit(self) -> None:
        """Forget an explicit step that raised an exception."""
        self._is_open, self._begin, self._last_step = False, None, self._recorder.step
        self._values = StepValues(set(self._never_timed))

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Report the learning rate of this optimizer."""
        self._optimizer = weakref.ref(optimizer)

    # Work in the current step. It is called on the training thread.

    @property
    def step(self) -> int:
        """Return the number of completed steps."""
        return self._recorder.step

    def begin_work(self, work: Work) -> Begin:
        """Return the begin of work, or None if the current step has too much of it to be timed."""
        if work in self._values.untimed:
            return None
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        if len(self._values.spans.get(work, ())) >= MAX_DEVICE_SPANS:
            self._values.untimed.add(work)
            return None
        return step_clock.now()

    def end_work(self, work: Work, begin: Begin) -> None:
        """Add work of the training thread to the current step."""
        if begin is None:
            return
        if isinstance(begin, Moment):
            end = step_clock.now()
            self._values.spans.setdefault(work, []).append((begin, end))
            self._recorder.add_span(work, begin.host_s, end.host_s)
        else:
            self._recorder.add_span(work, begin, time.perf_counter())
        self._values.timed.add(work)

    def trace_backward(self, began_s: float) -> None:
        """Add a backward pass to the trace. The diagnosis infers waits inside torch from its end."""
        self._recorder.add_span("backward", began_s, time.perf_counter())

    def stop_timing(self, work: Work) -> None:
        """Leave the time of this work unknown from now on."""
        self._never_timed.add(work)
        self._values.untimed.add(work)

    def add_samples(self, dataset: int, samples: int | None) -> None:
        """Add a batch of all ranks, None if its size is unknown."""
        self._values.add_samples(dataset, samples)

    # Reports. They are called on the thread of the exporter.

    def poll(self) -> None:
        """Send the items of steps that have ended on their device, and the number of steps without a time."""
        if self._send is None:
            return
        if self._pending:
            self._recorder.poll_devices()
        while self._pending and self._pending[0].end.has_passed():
            ended = self._pending.popleft()
            self._reported_step = ended.step
            self._send(self._build_item(ended))
        if self._untimed_step > self._reported_step:
            self._reported_step = self._untimed_step
            recorder = self._recorder
            item = PhaseItem(kind="phase", rank=recorder.rank, time=time.time(), phase="step")
            item["steps"] = self._reported_step
            self._send(item)

    def close(self) -> None:
        """End the item of the last steps. Called on the training thread before the last `poll`."""
        recorder = self._recorder
        if recorder.step > self._last_step:
            self._end_item(recorder.step, Moment(self._step_began_s))  # the last mark, not the end of the script
        if self._is_open:  # its end is unknown, but it counts as a step
            self._untimed_step = recorder.step = recorder.step + 1

    def _take_over(self, priority: int) -> None:
        """Let marks of a higher priority delimit the steps. The first marks of a lower one do not count."""
        if self._recorder.step < SCRIPT_SETUP_STEPS:
            self._recorder.step = 0
        self._priority, self._begin = priority, None
        self._last_step = self._recorder.step
        self._values = StepValues(set(self._never_timed))

    def _end_item(self, step: int, end: Moment) -> None:
        recorder = self._recorder
        times, counters = recorder.split_step(step)
        num_steps = step - self._last_step
        if self._begin is None:
            self._untimed_step = step
        elif num_steps:
            ended = EndedStep(
                step=step,
                num_steps=num_steps,
                begin=self._begin,
                end=end,
                unix_s=time.time(),
                times=times,
                counters=counters,
                values=self._values,
                learning_rate=self._get_learning_rate(),
            )
            self._pending.append(ended)
            if step >= WARMUP_STEPS:  # so that no item mixes them with others
                self._adapt((end.host_s - self._begin.host_s) / num_steps)
                self._next_due_s = end.host_s + 4 * self._period_s
        self.is_sampled = True
        self._begin, self._last_step, self._step_began_s = end, step, end.host_s
        self._values = StepValues(set(self._never_timed))
        self._on_step()
        if step >= SCRIPT_SETUP_STEPS:
            recorder.set_phase("step")

    def _adapt(self, per_step_s: float) -> None:
        """Choose how many steps share an item. The number is a power of two, which makes ranks report equal steps."""
        while per_step_s * (self._mask + 1) < self._period_s and self._mask < 2**30:
            self._mask = 2 * self._mask + 1
        while self._mask and per_step_s * (self._mask + 1) >= 2.5 * self._period_s:
            self._mask >>= 1

    def _begin_after_gap(self) -> None:
        if self._priority < EXPLICIT:
            self._take_over(EXPLICIT)
        begin, recorder = step_clock.now(), self._recorder
        self._step_began_s = begin.host_s
        if self._begin is None or self._last_step == recorder.step:
            self._begin = begin
            recorder.begin_step(recorder.step + 1)
        else:
            self._values.gap_s += begin.host_s - self._gap_began_s

    def _get_learning_rate(self) -> float | None:
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        rate = groups[0].get("lr") if groups else None
        # A tensor may be on a GPU, and reading it would wait for the GPU.
        return float(rate) if isinstance(rate, int | float) and abs(rate) <= MAX_ABS_NUMBER else None

    def _build_item(self, ended: EndedStep) -> StepItem:
        over, values = ended.num_steps, ended.values
        seconds = max(0.0, compute_seconds(ended.begin, ended.end) - values.gap_s)
        item = StepItem(
            kind="step",
            rank=self._recorder.rank,
            time=ended.unix_s,
            step=ended.step,
            ran=ended.step,
            counted=max(0, ended.step - SCRIPT_SETUP_STEPS),
            steps=None,
            step_s=seconds / over,
            tokens=None if values.tokens is None else round(values.tokens / over),
            loss=None,
            grad_norm=None,
            learning_rate=ended.learning_rate,
            cells=[build_cell(key, counters) for key, counters in sorted(ended.counters, key=lambda entry: entry[0])],
            parts=_build_parts(ended),
        )
        if over > 1:
            item["over"] = over
        item.update(_list_times(ended))  # type: ignore[typeddict-item]
        if (samples := values.get_samples()) is not None:
            item["samples"] = round(samples / over)
        return item


def _list_times(ended: EndedStep) -> dict[str, list[float]]:
    """Return the time of each of several steps, if known. The host runs ahead of a device and knows only the mean."""
    times = ended.values.times
    is_known = 1 < ended.num_steps == len(times) <= MAX_LISTED_STEPS and ended.end.event is None
    return {"times": times} if is_known else {}


def _build_parts(ended: EndedStep) -> StepBreakdown:
    """Return the mean breakdown of the steps."""
    over = ended.num_steps
    exposed, hidden = ended.times.get_axis_times()
    parts = StepBreakdown(
        exposed={axis: s / over for axis, s in exposed.items()},
        hidden={axis: s / over for axis, s in hidden.items()},
    )
    timed = ended.values.timed - ended.values.untimed
    if "data" in timed:
        parts["data"] = _sum_work(ended, "data") / over
    if "optimizer" in timed:
        parts["optimizer"] = _sum_work(ended, "optimizer")  # of the first step
    return parts


def _sum_work(ended: EndedStep, work: Work) -> float:
    spans = ended.values.spans.get(work)
    if not spans:
        return ended.times.work_s.get(work, 0.0)
    return sum(compute_seconds(begin, end) for begin, end in spans)
