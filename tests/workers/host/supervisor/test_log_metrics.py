"""Metrics in the log lines of common frameworks, and in lines that a user's pattern describes."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from contracts.codec import validate_item
from contracts.telemetry.items import LogItem
from planner.facts.log_pattern import LogPatternError, check_log_pattern
from workers.host.supervisor.log_metrics import LogMetrics

TITAN = (
    "[titan] - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1234  \x1b[33mgrad_norm:  1.2345  "
    "\x1b[34mmemory:  1.23GiB(1.20%)  \x1b[35mtps: 1,234  \x1b[36mtflops: 1.20  \x1b[37mmfu: 3.21%\x1b[0m"
)
MEGATRON = (
    " [2026-01-01 10:00:00] iteration       10/     100 | consumed samples:          320 | elapsed time per iteration "
    "(ms): 123.4 | learning rate: 1.000000E-04 | global batch size:    32 | lm loss: 1.083219E+01 | loss scale: 1.0 | "
    "grad norm: 2.1 | number of skipped iterations:   0 |"
)


def make_item(*lines: str, rank: int = 0, **more: Any) -> LogItem:
    return LogItem(kind="log", rank=rank, time=1.0, first=0, lines=list(lines), **more)


def read(*lines: str, pattern: str | None = None) -> list[tuple[str, int, dict[str, float]]]:
    items = LogMetrics(range(2), pattern).read(make_item(*lines))
    assert all(validate_item(item) for item in items)
    return [(item["source"], item["step"], item["values"]) for item in items]


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("iter 10: loss 2.1234, time 3.21ms, mfu 1.20%", 10, {"loss": 2.1234, "mfu": 1.2}),
        ("step 250: train loss 1.9, val loss 2.0", 250, {"eval_train_loss": 1.9, "val_loss": 2.0}),
        (TITAN, 10, {"loss": 8.1234, "grad_norm": 1.2345, "tps": 1234.0, "mfu": 3.21}),
        (MEGATRON, 10, {"lm_loss": 10.83219, "learning_rate": 1e-4, "grad_norm": 2.1}),
        (" validation loss at iteration 10 | lm loss value: 1.0E+01 |", 10, {"validation_lm_loss": 10.0}),
        (
            "step    10 | loss: 9.12 | lr 6e-04 | dt: 100.00ms | tok/sec: 12.5",
            10,
            {"loss": 9.12, "lr": 6e-4, "tok/sec": 12.5},
        ),
        ("iter_dt 12.34ms; iter 100: train loss 0.12345", 100, {"train_loss": 0.12345}),
        ("[rank 0] Step: 7 | Loss: 9.1 | Tokens/s: 1.2K | Tokens: 2M", 7, {"loss": 9.1, "tokens/s": 1200.0}),
        ("Epoch: [0][ 10/100]\tTime  0.1 ( 0.1)\tLoss 6.9e+00 (7.0e+00)", 10, {"loss": 6.9}),
        ("step=3 loss=2", 3, {"loss": 2.0}),
        ("step 3: loss=tensor(2.3456, device='cuda:0', grad_fn=<NllLossBackward0>)", 3, {"loss": 2.3456}),
        ("step 3 Loss: tensor([2.5], dtype=torch.bfloat16)", 3, {"loss": 2.5}),
        ("step 3 {'loss': np.float32(1e-05), 'acc': array(0.5, dtype=float32)}", 3, {"loss": 1e-5, "acc": 0.5}),
        ("step 3 losses: [tensor(2.0, grad_fn=<MeanBackward0>), tensor(3.)]", 3, {"loss": 2.5}),
        ("step 3: Loss of microbatches: [1.0, 2.0]", 3, {"loss": 1.5}),
        ("step 3 losses=tensor([1., 4.])", 3, {"loss": 2.5}),
    ],
)
def test_formats_of_common_frameworks(line: str, step: int, values: dict[str, float]) -> None:
    assert read(line) == [("log line", step, values)]


def test_lines_without_a_step_are_numbered() -> None:
    lines = ["{'loss': 2.5, 'learning_rate': 5e-05, 'epoch': 0.1}", "text", "{'loss': '2.0', 'epoch': '0.2'}"]
    lines += ["{'train_runtime': 10.1, 'train_loss': 2.1}", "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.1"]
    assert read(*lines) == [
        ("numbered log line", 1, {"loss": 2.5, "learning_rate": 5e-05}),
        ("numbered log line", 1, {"loss": 2.0}),
        ("numbered log line", 2, {"loss": 2.1}),
    ]


def test_progress_bar_counts_steps_over_epochs_and_reads_open_lines() -> None:
    metrics = LogMetrics(range(1))
    bar = "Epoch {}:  45%|####  | {}/100 [00:10<00:12,  4.40it/s, v_num=0, train_loss={}]"
    first = make_item(open=[bar.format(0, 45, 0.5)])
    second = make_item(bar.format(0, 45, 0.5), open=[bar.format(1, 3, 0.25)])
    items = [*metrics.read(first), *metrics.read(second)]
    assert [(item["step"], item["values"]) for item in items] == [
        (45, {"train_loss": 0.5}),
        (103, {"train_loss": 0.25}),
    ]


def test_nan_and_infinity() -> None:
    items = LogMetrics(range(1)).read(make_item("iter 1: loss nan", "iter 2: loss inf", "iter 3: loss -inf"))
    items += LogMetrics(range(1)).read(make_item("iter 4: loss tensor(nan)", "iter 5: losses: [tensor(inf), 1.0]"))
    assert [item["not_finite"]["loss"] for item in items] == ["nan", "inf", "-inf", "nan", "inf"]


@pytest.mark.parametrize(
    "line",
    [
        "the loss of packets: none",
        "weight loss is bad at step 3",
        "loss scale: 65536.0",
        "loss: tensor(<unprintable>)",
        "losses: [tensor(1.0), None]",
        "losses: []",
        "loss" + " " * 5000 + "1.0",
        "x" * 5000 + " loss: 1.0",
        "learning rate: 1e-3",
    ],
)
def test_lines_without_a_loss(line: str) -> None:
    assert read(line) == []


def test_launcher_counts_as_the_first_rank_without_logs_of_ranks() -> None:
    metrics = LogMetrics(range(2, 4))
    assert [item["rank"] for item in metrics.read(make_item("step 1 loss 1.0", rank=-1))] == [2]
    metrics.read(make_item("text", rank=3))
    assert metrics.read(make_item("step 2 loss 1.0", rank=-1)) == []


def test_lines_of_the_launcher_and_of_other_hosts_are_ignored() -> None:
    metrics = LogMetrics(range(2, 4))
    seen = [metrics.read(make_item("loss: 1.0", rank=rank)) != [] for rank in (0, 2, 3, -1)]
    assert seen == [False, True, True, False]


def test_pattern_replaces_the_defaults() -> None:
    pattern = r"^(?P<step>\d+)\s+ce=(?P<loss>\S+) acc=(?P<accuracy>[0-9.]+)?"
    lines = ["12 ce=1,234.5 acc=0.5", "13 ce=nan acc=", "loss: 3.0", "14 ce=bad acc="]
    items = LogMetrics(range(1), pattern).read(make_item(*lines))
    assert [(item["step"], item["values"]) for item in items] == [(12, {"loss": 1234.5, "accuracy": 0.5}), (13, {})]
    assert read("x=2", pattern=r"x=(?P<loss>\d)") == [("numbered log line", 1, {"loss": 2.0})]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"(?P<loss>[0-9.]+", "missing ), unterminated subpattern at character 1"),
        (r"*(?P<loss>x)", "nothing to repeat at character 1"),
        (r"a(?=x)(?P<loss>x)", "(?= is not supported at character 2"),
        (r"(?P<a>x)\1", r"\1 is not supported at character 9"),
        (r"(?P<loss>(a{1000}){1000})", "invalid repetition size: {1000} at character 12"),
        (r"(?P<step>\d+)", "the pattern has no named group for a metric, such as (?P<loss>[0-9.]+)"),
        ("".join(f"(?P<m{index}>x)" for index in range(21)), "the pattern has 21 named groups, and the maximum is 20"),
        ("(" * 250 + "(?P<loss>x)" + ")" * 250, None),
    ],
)
def test_bad_pattern_is_refused_with_its_position(pattern: str, problem: str | None) -> None:
    if problem is None:
        check_log_pattern(pattern)
        return
    with pytest.raises(LogPatternError) as caught:
        check_log_pattern(pattern)
    assert str(caught.value) == problem


def test_pattern_with_nested_quantifiers_is_linear() -> None:
    metrics = LogMetrics(range(1), r"^(a+)+(?P<loss>x)$")  # exponential in Python's re
    began_s = time.thread_time()
    assert metrics.read(make_item(*["a" * 1000] * 50)) == []
    assert time.thread_time() - began_s < 2


def test_a_flood_of_lines_is_bounded() -> None:
    metrics = LogMetrics(range(1))
    began_s = time.thread_time()
    items = metrics.read(make_item(*(f"step {step} loss {step}.5" for step in range(100_000))))
    assert time.thread_time() - began_s < 2
    assert 0 < len(items) <= 500
    assert items[-1]["values"] == {"loss": 99_999.5}


def test_values_above_the_rate_keep_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = LogMetrics(range(1))
    last = math.nan
    for read_number in range(30):
        lines = [f"step {500 * read_number + index} loss {index}" for index in range(500)]
        items = metrics.read(make_item(*lines))
        last = items[-1]["values"].get("loss", last) if items else last
    items = list(metrics.take_last())
    assert items[-1]["values"] == {"loss": 499.0}
    assert items[-1]["step"] == 30 * 500 - 1


def test_numbers_that_continue_over_epochs_are_steps() -> None:
    lines = [
        f"step {step:05d}/00040 | loss: 2.5 | epoch: {epoch}" for epoch, step in ((1, 1), (1, 20), (2, 21), (3, 39))
    ]
    assert [step for _, step, _ in read(*lines)] == [1, 20, 21, 39]


def test_numbers_that_once_restarted_belong_to_their_epochs() -> None:
    lines = [f"epoch {epoch} step {step}/100 loss 2.5" for epoch, step in ((1, 50), (2, 10), (3, 20), (4, 20))]
    assert [step for _, step, _ in read(*lines)] == [50, 110, 220, 320]
