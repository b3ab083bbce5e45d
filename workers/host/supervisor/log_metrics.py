"""Read losses and other metrics in the log lines of ranks.

The pattern of a user runs in RE2, whose time is linear in the length of a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from statistics import fmean
from typing import Any, Final, NamedTuple

from contracts.fields import strip_control_characters
from contracts.telemetry.items import LogItem
from contracts.telemetry.metrics import MetricItem
from planner.facts.log_pattern import compile_log_pattern, parse_number
from workers.host.rank_files import LAUNCHER_RANK
from workers.metric_values import MetricCollector

MAX_LINE_CHARS: Final = 1000  # longer lines are not searched
MAX_LINES_PER_READ: Final = 500  # of a rank; the oldest are not searched

# Runs of white space are single spaces, so the time of these patterns is linear.
_NUMBER = r"([-+]?(?:nan|inf|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?))"
_WORDS = r"(?:train|training|val|valid|validation|eval|test|lm|average|avg|mean|total|global|aux)"
_NAMES = "|".join(
    (
        rf"(?:{_WORDS}[ _/-]){{0,3}}loss(?:[_/](?:step|epoch|train|val|validation|eval|test))?",
        r"learning[ _]rate|lr",
        r"(?:grad|gradient)[ _]?norm|norm",
        r"tok/sec|tok/s|tokens/s|tokens/sec|tokens_per_second|tokens per second|tps",
        r"samples/s|samples_per_second|samples per second",
        r"mfu|ppl|perplexity|accuracy|acc",
    )
)
_PAIR = re.compile(
    rf"(?:^|[ ,;|{{(\['\"])({_NAMES})(?: value)?['\"]?(?: ?[:=] ?| )['\"]?{_NUMBER}([kmb]?)(?![\w/])", re.IGNORECASE
)
# "tensor(2.3, device='cuda:0', grad_fn=<NllLossBackward0>)", and the same of NumPy
_WRAPPED = re.compile(
    r"\b(?:tensor|array|(?:np\.)?float(?:16|32|64)|Parameter containing: tensor)\( ?"
    r"([-+]?[\d.][^\s,()\[\]]*|[-+]?(?:nan|inf)|\[[^\[\]()]*\])(?:, ?[a-z_]+=[^\s,()]+)* ?\)",
    re.IGNORECASE,
)
_LOSSES = re.compile(r"\b(?:losses|loss(?: of micro[- ]?batches)?)['\"]? ?[:=]? ?\[([^\[\]]*)\]", re.IGNORECASE)
_STEP = re.compile(
    r"\b(?:step|iter|iters|iteration|global_step)\b['\"]? ?[:=#]? ?\[? ?(\d{1,15})(?: ?/ ?(\d{1,15}))?", re.IGNORECASE
)
_EPOCH = re.compile(r"\bepoch\b['\"]? ?[:=#]? ?\[? ?(\d{1,9})\b(?!\.\d)", re.IGNORECASE)
# "45/100 [00:10<00:12" of tqdm, and "Epoch: [0][ 10/100]" of pytorch/examples
_PROGRESS = re.compile(r"\b(\d{1,15})/(\d{1,15}) \[[\d:]+<|\]\[ ?(\d{1,15})/(\d{1,15})\]")
_FACTORS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_SUMMARY_WORDS: Final = ("train_runtime",)  # lines about a whole run


class LineMetrics(NamedTuple):
    """Metrics of a line. `step` is None if the line contains no step."""

    step: int | None
    values: dict[str, float]


class StepNumbering:
    """Number the steps of a log over all epochs. Some scripts restart their numbers in each epoch."""

    def __init__(self, first_epoch: int) -> None:
        self._first_epoch = self._epoch = first_epoch
        self._number = 0  # of the last line
        self._continues = self._has_restarted = False

    def find_step(self, epoch: int, number: int, length: int) -> int:
        """Return the step of a line with this number in an epoch of this length."""
        if epoch != self._epoch:
            self._has_restarted |= number <= self._number
            self._continues = not self._has_restarted
        self._epoch, self._number = epoch, number
        return number if self._continues else max(0, epoch - self._first_epoch) * length + number


class LogMetrics:
    """Read the metrics in the log lines of the ranks of a host."""

    def __init__(self, ranks: range, pattern: str | None = None) -> None:
        self._ranks = ranks
        self._pattern = compile_log_pattern(pattern) if pattern else None
        self._has_rank_logs = False
        self._collectors: dict[int, MetricCollector] = {}
        self._numberings: dict[int, StepNumbering] = {}
        self._num_lines: dict[tuple[int, frozenset[str]], int] = {}  # lines without a step, per rank and names
        self._last: dict[tuple[int, str], tuple[int, float]] = {}  # step and value per rank and name

    def read(self, item: LogItem) -> list[MetricItem]:
        """Return the metrics of new lines of a rank.

        If no rank has its own log, the log of the launcher counts as the log of the first rank.
        """
        rank = item["rank"]
        if rank == LAUNCHER_RANK and not self._has_rank_logs:
            rank = self._ranks[0]
        elif rank in self._ranks:
            self._has_rank_logs = True
        else:
            return []
        if (skipped := len(item["lines"]) - MAX_LINES_PER_READ) > 0:
            self._get_collector(rank).skip(skipped)
        for line in item["lines"][-MAX_LINES_PER_READ:]:
            self._add_line(rank, line, is_complete=True)
        for line in item.get("open", ()):
            self._add_line(rank, line, is_complete=False)
        collector = self._collectors.get(rank)
        return [] if collector is None else collector.take()

    def take_last(self) -> Iterator[MetricItem]:
        """Yield the newest values that were above the rate, at the end of a run."""
        for collector in self._collectors.values():
            yield from collector.take(final=True)

    def _add_line(self, rank: int, line: str, *, is_complete: bool) -> None:
        found = self._parse_line(rank, line)
        if found is None or (found.step is None and not is_complete):
            return
        step, source = found.step, "log line"
        if step is None:
            key = rank, frozenset(found.values)
            step = self._num_lines[key] = self._num_lines.get(key, 0) + 1
            source = "numbered log line"
        new = {name: value for name, value in found.values.items() if self._is_new(rank, name, step, value)}
        if new:
            self._get_collector(rank).add(source, step, new)  # type: ignore[arg-type]

    def _get_collector(self, rank: int) -> MetricCollector:
        if rank not in self._collectors:
            self._collectors[rank] = MetricCollector(rank, len(self._ranks))
        return self._collectors[rank]

    def _is_new(self, rank: int, name: str, step: int, value: float) -> bool:
        """Return False for a state of a progress bar that was read before."""
        before = self._last.get((rank, name))
        self._last[rank, name] = step, value
        return before is None or before[0] != step or (before[1] != value and not math.isnan(value))

    def _parse_line(self, rank: int, line: str) -> LineMetrics | None:
        if len(line) > MAX_LINE_CHARS:
            return None
        if self._pattern is not None:
            return parse_with_pattern(self._pattern, line)
        if "loss" not in line and "loss" not in line.lower():
            return None
        text = " ".join(strip_control_characters(line).split())
        values = _find_values(text)
        return LineMetrics(self._find_step(rank, text), values) if values else None

    def _find_step(self, rank: int, text: str) -> int | None:
        epoch = _EPOCH.search(text)
        number, length = _find_step_in_epoch(text)
        if epoch is None or number is None:
            return number
        if not length:  # the number may start again in each epoch
            return None
        numbering = self._numberings.setdefault(rank, StepNumbering(int(epoch[1])))
        return numbering.find_step(int(epoch[1]), number, length)


def parse_with_pattern(pattern: Any, line: str) -> LineMetrics | None:
    """Return the metrics that the named groups of a pattern find in a line, or None."""
    match = pattern.search(line)
    if match is None:
        return None
    numbers = {name: parse_number(text) for name, text in match.groupdict().items() if text}
    values = {name: number for name, number in numbers.items() if number is not None}
    step = values.pop("step", None)
    if not values or (step is not None and not (0 <= step < 2**53)):
        return None
    return LineMetrics(None if step is None else int(step), values)


def _find_values(text: str) -> dict[str, float]:
    if any(word in text for word in _SUMMARY_WORDS):
        return {}
    if "(" in text:
        text = _WRAPPED.sub(r"\1", text)
    if "[" in text:
        text = _LOSSES.sub(_format_mean_loss, text)
    values: dict[str, float] = {}
    for match in _PAIR.finditer(text):
        number = parse_number(match[2])
        if number is not None:
            values.setdefault("_".join(match[1].lower().split()), number * _FACTORS[(match[3] or "").lower()])
    if not any("loss" in name for name in values):
        return {}
    if "train_loss" in values and "val_loss" in values:  # nanoGPT estimates both in an evaluation
        values["eval_train_loss"] = values.pop("train_loss")
    if "validation loss at iteration" in text:  # Megatron
        return {f"validation_{name}": value for name, value in values.items()}
    return values


def _format_mean_loss(match: re.Match[str]) -> str:
    """Return the mean of a list of losses, which are those of micro-batches, or the unchanged text."""
    numbers = [parse_number(text) for text in re.split(r"[ ,]+", match[1].strip(" ,"))]
    found = [number for number in numbers if number is not None]
    return f"loss: {fmean(found)}" if found and len(found) == len(numbers) else match[0]


def _find_step_in_epoch(text: str) -> tuple[int | None, int]:
    """Return the step of a line, or None, and the number of steps of an epoch, 0 if it is unknown."""
    if match := _STEP.search(text):
        return int(match[1]), int(match[2] or 0)
    if match := _PROGRESS.search(text):
        return int(match[1] or match[3]), int(match[2] or match[4])
    return None, 0
