"""Steps of a script are timed between marks, and the item of a step has only values that the meter can read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from contracts.codec import validate_item
from contracts.telemetry.items import MAX_LISTED_STEPS, StepItem
from workers.meter import script_steps, step_clock
from workers.meter.recorder import Recorder
from workers.meter.script_steps import EXPLICIT, OPTIMIZER, PROFILER, StepTracker
from workers.meter.training_hooks import MAX_TIMED_OPTIMIZERS, find_batch_size, install_hooks


class Script:
    """A script under the meter: its tracker, and the items that it sent."""

    def __init__(self) -> None:
        self.recorder, self.items = Recorder(0), list[Any]()
        self.tracker = StepTracker(self.recorder, self.items.append)

    def get_steps(self) -> list[StepItem]:
        """Return all step items so far. Each is valid."""
        self.tracker.poll()
        return [validate_item(item) for item in self.items if item["kind"] == "step"]

    def get_counts(self) -> list[int]:
        self.tracker.poll()
        return [item["steps"] for item in self.items if item["kind"] == "phase"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(script_steps, "MIN_ITEM_PERIOD_S", 0.0)  # an item per step
    monkeypatch.setattr(script_steps, "MAX_ITEMS_PER_S", 1e9)
    script = Script()
    remove = install_hooks(script.tracker)
    yield script
    remove()


def make_optimizer(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.5, **options)


def test_step_lasts_from_one_end_of_the_optimizer_to_the_next(script: Script) -> None:
    optimizer = make_optimizer()
    times: list[float] = []
    for pause_s in (0.2, 0.05, 0.15):
        time.sleep(pause_s)
        optimizer.step()
        times.append(time.perf_counter())
        script.tracker.poll()
    second, third = script.get_steps()
    assert script.get_counts() == [1], "the first step has no begin"
    assert (second["step"], third["step"]) == (2, 3)
    assert second["step_s"] == pytest.approx(times[1] - times[0], abs=0.03)
    assert third["step_s"] == pytest.approx(times[2] - times[1], abs=0.03)
    assert third["learning_rate"] == 0.5


def test_values_that_the_meter_cannot_read_are_unknown(script: Script) -> None:
    optimizer = make_optimizer()
    optimizer.step()
    optimizer.step()
    (item,) = script.get_steps()
    assert [item[name] for name in ("steps", "tokens", "loss", "grad_norm")] == [None] * 4
    assert "samples" not in item
    assert "data" not in item["parts"], "the script has no DataLoader"
    assert "optimizer" in item["parts"]


def test_learning_rate_in_a_tensor_is_unknown(script: Script) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), capturable=False)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert [item["learning_rate"] for item in script.get_steps()] == [None]


def test_gradient_accumulation_is_one_step(script: Script) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batch in range(8):
        model(torch.ones(1, 2)).sum().backward()
        if micro_batch % 4 == 3:
            optimizer.step()
    assert script.recorder.step == 2


def test_optimizers_that_take_turns_make_one_step(script: Script) -> None:
    first, second = make_optimizer(), make_optimizer()
    for optimizer in (first, second, first, second):
        optimizer.step()
    assert script.recorder.step == 2
    first.step()
    first.step()
    assert script.recorder.step == 4, "one that steps twice makes two"
    del first, second, optimizer
    make_optimizer().step()
    assert script.recorder.step == 5, "a new optimizer continues after the old ones are freed"


def test_new_optimizer_in_each_step_makes_steps(script: Script) -> None:
    for _ in range(10):
        optimizer = make_optimizer()
        optimizer.step()
    assert script.recorder.step == 10


def test_optimizer_that_calls_its_base_steps_once(script: Script) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    make_optimizer()  # lets torch wrap the method of the base class too
    optimizer = make_optimizer(Own)
    for _ in range(3):
        optimizer.step()
    assert script.recorder.step == 3


def test_error_of_an_optimizer_loses_at_most_one_step(script: Script) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    optimizer, other = make_optimizer(Failing), make_optimizer()
    optimizer.step()
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.fails = False
    for _ in range(4):
        optimizer.step()
    assert script.recorder.step in (4, 5)
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()
    for _ in range(4):
        other.step()
    assert script.recorder.step >= 7, "another optimizer continues"
    assert "optimizer" in script.get_steps()[-1]["parts"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_skipped_step_of_the_gradient_scaler_counts(script: Script, kind: Any) -> None:
    optimizer = make_optimizer(kind)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu")
    for overflows in (False, True, True, False):
        optimizer.zero_grad()
        scaler.scale((parameter * (torch.inf if overflows else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert script.recorder.step == 4
    assert [item["step"] for item in script.get_steps()] == [2, 3, 4]


def test_optimizers_in_backward_make_one_step(script: Script) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(MAX_TIMED_OPTIMIZERS)))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert script.recorder.step == 3
    *_, last = script.get_steps()
    assert "optimizer" not in last["parts"], "thousands of optimizers are not timed one by one"


def test_closure_counts_as_compute(script: Script) -> None:
    optimizer = make_optimizer(torch.optim.LBFGS, max_iter=2)
    (parameter,) = optimizer.param_groups[0]["params"]
    calls = []

    def closure() -> torch.Tensor:
        time.sleep(0.02)
        calls.append(1)
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure=closure)
    (item,) = script.get_steps()
    assert script.recorder.step == 2
    assert len(calls) >= 3
    assert item["step_s"] - item["parts"]["optimizer"] >= 0.02, "the time of the closure counts as optimizer time"


def test_batches_give_data_time_and_samples(script: Script) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    data, optimizer = Slow(torch.ones(12, 3)), make_optimizer()
    for _ in DataLoader(data, batch_size=4):
        with torch.no_grad():
            next(iter(DataLoader(TensorDataset(torch.ones(6)), batch_size=6)))
        optimizer.step()
    second, third = script.get_steps()
    assert 0.04 <= second["parts"]["data"] <= second["step_s"]
    assert second["samples"] == third["samples"] == 4, "a validation adds none"


def test_distributed_sampler_multiplies_the_samples(script: Script) -> None:
    data, optimizer = TensorDataset(torch.ones(24)), make_optimizer()
    sampler = DistributedSampler(data, num_replicas=3, rank=0)
    for _ in DataLoader(data, batch_size=2, sampler=sampler):
        optimizer.step()
    assert [item["samples"] for item in script.get_steps()] == [6, 6, 6]


def test_samples_of_unknown_batches_are_unknown(script: Script) -> None:
    optimizer = make_optimizer()
    one, other = (DataLoader(TensorDataset(torch.ones(8)), batch_size=2) for _ in range(2))
    for _ in zip(one, other, strict=True):
        optimizer.step()
    for _ in DataLoader(TensorDataset(torch.ones(8, 5)), batch_size=2, collate_fn=lambda _: "text"):
        optimizer.step()
    assert all("samples" not in item for item in script.get_steps())


def test_number_of_ranks_that_share_batches_is_unknown(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    optimizer = make_optimizer()
    for _ in DataLoader(TensorDataset(torch.ones(8)), batch_size=2):
        optimizer.step()
    assert all("samples" not in item for item in script.get_steps())


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(4, 2), 4),
        ({"ids": torch.ones(3)}, 3),
        ([["text"], (torch.ones(5), 1)], 5),
        (torch.ones(()), None),
        ("text", None),
        ([[[[[torch.ones(2)]]]]], None),
    ],
)
def test_batch_size_is_that_of_its_first_tensor(batch: Any, size: int | None) -> None:
    assert find_batch_size(batch) == size


def test_explicit_steps_win(script: Script) -> None:
    optimizer, tracker, durations = make_optimizer(), script.tracker, []
    for _ in range(3):
        began = time.perf_counter()
        tracker.begin_explicit(tokens=10)
        time.sleep(0.02)
        optimizer.step()
        optimizer.step()
        tracker.end_explicit()
        durations.append(time.perf_counter() - began)
        time.sleep(0.05)  # belongs to no step
    items = script.get_steps()
    assert [item["step"] for item in items] == [1, 2, 3]
    assert [item["tokens"] for item in items] == [10, 10, 10]
    for item, duration_s in zip(items, durations, strict=True):
        assert 0.02 <= item["step_s"] <= duration_s


def test_explicit_marks_without_a_block_end_at_the_next_mark(script: Script) -> None:
    for _ in range(3):
        script.tracker.begin_explicit(samples=4)
        time.sleep(0.01)
    script.tracker.close()
    assert [item["step"] for item in script.get_steps()] == [1, 2]
    assert [item["samples"] for item in script.get_steps()] == [4, 4]
    assert script.get_counts() == [3], "the end of the last step is unknown"


def test_explicit_step_that_raises_is_no_step(script: Script) -> None:
    script.tracker.begin_explicit()
    time.sleep(0.1)
    script.tracker.abandon_explicit()
    began = time.perf_counter()
    script.tracker.begin_explicit()
    script.tracker.end_explicit()
    duration_s = time.perf_counter() - began
    (item,) = script.get_steps()
    assert (item["step"], script.recorder.step) == (1, 1)
    assert item["step_s"] <= duration_s


def test_profiler_marks_steps_only_without_an_optimizer(script: Script) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        profiler.step()
        profiler.step()
        assert script.recorder.step == 2
        optimizer = make_optimizer()
        for _ in range(3):
            optimizer.step()
            profiler.step()
    assert script.recorder.step == 5


def test_marks_of_a_lower_priority_do_not_count(script: Script) -> None:
    for priority in (PROFILER, OPTIMIZER, PROFILER, EXPLICIT, OPTIMIZER):
        script.tracker.mark(priority)
    assert script.recorder.step == 1


def test_setup_phase_has_the_first_two_steps(script: Script) -> None:
    optimizer = make_optimizer()
    for _ in range(4):
        script.recorder.issue("all_reduce", "0", 2, 8)()
        optimizer.step()
    items = script.get_steps()
    assert [item["counted"] for item in items] == [0, 1, 2]
    assert [[cell["count"] for cell in item["cells"]] for item in items] == [[], [1], [2]]


def test_item_has_the_waits_of_its_step(script: Script) -> None:
    optimizer = make_optimizer()
    for blocked_s in (0.0, 0.0, 0.5, 0.25):
        collective = script.recorder.issue("all_reduce", "0", 2, 8)
        collective.add_blocked_time(blocked_s)
        collective()
        optimizer.step()
    assert [item["parts"]["exposed"].get("world") for item in script.get_steps()] == [None, 0.5, 0.25]


def flood(num_steps: int) -> Script:
    script = Script()
    for _ in range(num_steps):
        script.tracker.mark(OPTIMIZER)
    script.tracker.close()
    return script


def test_flood_of_steps_is_bounded() -> None:
    began = time.perf_counter()
    script = flood(100_000)
    elapsed = time.perf_counter() - began
    items = script.get_steps()
    assert sum(item.get("over", 1) for item in items) == 100_000 - 1
    assert len(items) < 30 + elapsed / script_steps.MIN_ITEM_PERIOD_S
    assert sum(item["step_s"] * item.get("over", 1) for item in items) == pytest.approx(elapsed, rel=0.2)
    assert script.recorder.completed_steps == 100_000


def test_short_steps_share_an_item_with_a_time_for_each() -> None:
    script = Script()
    marks = [time.perf_counter()]
    for _ in range(40):
        time.sleep(0.004)
        script.tracker.mark(OPTIMIZER)
        marks.append(time.perf_counter())
    longest_s = max(later - earlier for earlier, later in pairwise(marks))
    time.sleep(10 * longest_s)  # the rest of the script is not a step
    script.tracker.close()
    shared = [item for item in script.get_steps() if item.get("over", 1) > 1]
    assert shared
    for item in shared:
        assert len(item["times"]) == item["over"] <= MAX_LISTED_STEPS
        assert sum(item["times"]) / item["over"] == pytest.approx(item["step_s"])
        assert min(item["times"]) >= 0.004
        assert max(item["times"]) < 5 * longest_s


def test_slow_steps_after_a_flood_are_reported_at_once() -> None:
    script = flood(20_000)
    for _ in range(4):
        script.tracker._next_due_s = 0.0  # as after a long step
        script.tracker.mark(OPTIMIZER)
    assert [item["step"] for item in script.get_steps()][-3:] == [20_002, 20_003, 20_004]


def test_memory_of_the_tracker_is_bounded_without_an_exporter() -> None:
    script = Script()
    for _ in range(script_steps.MAX_PENDING_STEPS + 100):
        script.tracker._mask = 0
        script.tracker.mark(OPTIMIZER)
    assert len(script.tracker._pending) == script_steps.MAX_PENDING_STEPS


def test_first_short_step_of_an_item_is_traced() -> None:
    script = Script()
    script.recorder.enable_tracing()
    marks = [time.perf_counter()]
    for _ in range(64):
        time.sleep(0.001)
        script.tracker.mark(OPTIMIZER)
        marks.append(time.perf_counter())
    traces = script.recorder.take_traces()
    assert traces
    longest_s = max(last - first for first, last in zip(marks, marks[2:], strict=False))
    assert all(0.001 <= trace.ended_s - trace.began_s < longest_s for trace in traces), "one step each"


def test_backward_is_traced(script: Script) -> None:
    script.recorder.enable_tracing()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [[span.work for span in trace.spans] for trace in script.recorder.take_traces()] == [
        ["backward", "optimizer"]
    ] * 2


class Event:
    """CUDA event of a device that is behind the host. `passed` is the time of the device in ms."""

    passed = 0.0
    clock = 0.0

    def __init__(self) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        Event.clock += 100.0
        self.at_ms = Event.clock

    def query(self) -> bool:
        return self.at_ms <= Event.passed

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "a time was read before the device reached it"
        assert end.query(), "a time was read before the device reached it"
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.passed = Event.clock = 0.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(step_clock, "create_timing_event", Event)


def test_device_times_its_steps_without_a_wait(script: Script, device: None) -> None:
    optimizer = make_optimizer()
    for _ in range(3):
        optimizer.step()  # three events, 100 ms apart: begin and end of the optimizer, end of the step
    assert script.get_steps() == [], "the device has not reached any end"
    Event.passed = 600.0
    (second,) = script.get_steps()
    assert second["step_s"] == pytest.approx(0.3)
    assert second["parts"]["optimizer"] == pytest.approx(0.1)
    Event.passed = 900.0
    assert [item["step"] for item in script.get_steps()] == [2, 3]


def test_late_wait_on_a_device_belongs_to_its_own_step(script: Script, device: None) -> None:
    optimizer = make_optimizer()
    script.recorder.add_group("0", range(2), on_device=True)
    for _ in range(2):
        optimizer.step()
    collective = script.recorder.issue("all_reduce", "0", 2, 8)
    for _ in range(2):
        optimizer.step()
    collective.add_blocked_time(0.05)  # the poller reads it now
    collective.complete(0.05)
    Event.passed = 1e9
    assert [item["parts"]["exposed"] for item in script.get_steps()] == [{}, {"world": 0.05}, {}]


def test_captured_graph_gets_no_event(script: Script, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    optimizer = make_optimizer()
    optimizer.step()
    optimizer.step()
    assert Event.clock == 0.0
    assert len(script.get_steps()) == 1


def test_many_optimizers_on_a_device_are_not_timed(script: Script, device: None) -> None:
    optimizers = [make_optimizer() for _ in range(script_steps.MAX_DEVICE_SPANS + 1)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    Event.passed = 1e9
    assert ["optimizer" in item["parts"] for item in script.get_steps()] == [False, False]
