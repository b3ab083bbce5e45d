"""Hooks into torch's optimizers, gradient scaler, profiler and data loader, which mark and time the steps of a script.

Several optimizers that take turns make one step together. The next step begins when one of them steps again.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workers.meter.script_steps import OPTIMIZER, PROFILER, Begin, StepTracker
from workers.meter.work import MAIN_THREAD
from workers.torch_private.data import get_batch_source, patch_next_batch
from workers.torch_private.groups import skip_dynamo

MAX_TIMED_OPTIMIZERS = 64  # per step; timing each of thousands would slow the script
MAX_BATCH_DEPTH = 4  # of nested lists and dictionaries
Remove = Callable[[], None]


def install_hooks(tracker: StepTracker) -> Remove:
    """Mark and time the steps of all code from now on. The returned function removes the hooks."""
    optimizers = OptimizerHooks(tracker)

    def watch_scaler(original: Any) -> Any:
        def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            num_ends = optimizers.num_ends
            result = original(self, optimizer, *args, **kwargs)
            if optimizers.num_ends == num_ends:  # the gradients overflowed, so the optimizer did not step
                optimizers.mark(optimizer)
            return result

        return step

    def watch_profiler(original: Any) -> Any:
        def step(self: Any) -> None:
            original(self)
            tracker.mark(PROFILER)

        return step

    def watch_backward(original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> None:
            began_s = time.perf_counter()
            original(*args, **kwargs)
            if tracker.is_sampled:
                tracker.trace_backward(began_s)

        return skip_dynamo(backward)

    removers = (
        optimizers.install(),
        _patch(torch.amp.GradScaler, "step", watch_scaler),
        _patch(torch.autograd, "backward", watch_backward),
        _patch(torch.profiler.profile, "step", watch_profiler),
        patch_next_batch(functools.partial(_watch_batches, tracker)),
    )

    def remove() -> None:
        for remover in removers:
            remover()

    return remove


class OptimizerHooks:
    """Hooks around `step` of all optimizers."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None  # the first optimizer of the current step
        self._stepped: set[int] = set()  # identities of the other optimizers of the current step
        self._last_was_end = False
        self._timed = 0  # identity of the optimizer that is being timed, 0 for none
        self._timed_since_step = 0
        self._depth = 0  # of its nested calls, because a subclass may call `super().step`
        self._begin: Begin = None
        self._num_in_step = 0
        self._remove_begin: Remove = lambda: None
        self.num_ends = 0

    def install(self) -> Remove:
        begin = register_optimizer_step_pre_hook(self._on_begin)
        end = register_optimizer_step_post_hook(self._on_end)
        self._remove_begin = begin.remove

        def remove() -> None:
            begin.remove()
            end.remove()

        return remove

    def mark(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the end of a step if this optimizer begins a new turn."""
        leader = None if self._leader is None else self._leader()
        if leader is not None and leader is not optimizer and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._num_in_step += 1
            if self._num_in_step == MAX_TIMED_OPTIMIZERS:
                self._stop_timing()
            return
        if leader is not optimizer:
            self._leader = weakref.ref(optimizer)
            self._tracker.follow_optimizer(optimizer)
        self._stepped.clear()
        self._num_in_step = 0
        self._tracker.mark(OPTIMIZER)

    @skip_dynamo
    def _on_begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        was_end, self._last_was_end = self._last_was_end, False
        if not self._tracker.is_sampled:
            return None
        key = id(optimizer)
        if self._timed == key and not was_end:
            self._depth += 1
            return None
        # An optimizer that calls another one is timed as a whole. An optimizer that raised an exception stays open.
        if self._timed and self._timed != key and self._tracker.step - self._timed_since_step <= 1:
            return None
        self._timed, self._timed_since_step, self._depth = key, self._tracker.step, 1
        self._begin = self._tracker.begin_work("optimizer")
        return self._exclude_closure(args, kwargs)

    @skip_dynamo
    def _on_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.num_ends += 1
        self._last_was_end = True
        if self._timed == id(optimizer):
            self._depth -= 1
            if self._depth:
                return
            self._timed = 0
            self._tracker.end_work("optimizer", self._begin)
        self.mark(optimizer)

    def _exclude_closure(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Count the forward and backward passes in a closure as compute, not as the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def run(*values: Any, **named: Any) -> Any:
            self._tracker.end_work("optimizer", self._begin)
            try:
                return closure(*values, **named)
            finally:
                self._begin = self._tracker.begin_work("optimizer")

        return ((args[0], run, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": run})

    def _stop_timing(self) -> None:
        self._remove_begin()
        self._timed = 0
        self._tracker.stop_timing("optimizer")


def _watch_batches(tracker: StepTracker, original: Any) -> Any:
    is_nested = False

    def next_batch(iterator: Any) -> Any:
        nonlocal is_nested
        if is_nested or threading.get_ident() != MAIN_THREAD:  # another thread prefetches
            return original(iterator)
        is_nested = True
        begin = tracker.begin_work("data")
        try:
            batch = original(iterator)
        finally:
            is_nested = False
            tracker.end_work("data", begin)
        if torch.is_grad_enabled():  # batches of a validation do not count
            source = get_batch_source(iterator)
            tracker.add_samples(source.dataset, _count_samples(batch, source.batch_size, source.num_replicas))
        return batch

    return next_batch


def _count_samples(batch: Any, batch_size: int | None, num_replicas: int | None) -> int | None:
    """Return the samples that all ranks fetched, or None if the number is unknown."""
    size = find_batch_size(batch)
    if num_replicas is None and not (dist.is_initialized() and dist.get_world_size() > 1):
        num_replicas = 1
    if size is None or batch_size is None or size > batch_size or num_replicas is None:
        return None
    return size * num_replicas


def find_batch_size(batch: Any, depth: int = 0) -> int | None:
    """Return the first dimension of the first tensor of a batch, or None without one."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if depth == MAX_BATCH_DEPTH:
        return None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    for value in values:
        size = find_batch_size(value, depth + 1)
        if size is not None:
            return size
    return None


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Remove:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    return lambda: setattr(owner, name, original)
