"""Metrics that a script reports by itself, for example its loss, and the order of their sources."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple, NotRequired, TypeVar, get_args

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.fields import Count, Number, Rank

MAX_METRIC_NAMES: Final = 200  # of a rank
MAX_METRIC_NAME_CHARS: Final = 100
MAX_METRICS_PER_ITEM: Final = 200

# In the order of preference. A numbered log line contains no step, so its number among such lines replaces the step.
MetricSource = Literal[
    "meshboard.log",
    "Trainer.log",
    "SummaryWriter",
    "wandb",
    "trackio",
    "mlflow",
    "event file",
    "log line",
    "numbered log line",
]
METRIC_SOURCES: Final[tuple[MetricSource, ...]] = get_args(MetricSource)
MetricName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_METRIC_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]+$")
]
NotFinite = Literal["nan", "inf", "-inf"]
Values = TypeVar("Values")


class LeftOutMetrics(TypedDict):
    """Values of a rank that were left out so far, by reason."""

    names: Count  # beyond MAX_METRIC_NAMES, or with a name that is too long
    rate: Count  # reported faster than the limit
    invalid: Count  # not a number


class MetricItem(TypedDict):
    """Values that a rank reported for one step, by name. The script numbers the steps."""

    kind: Literal["metric"]
    rank: Rank
    time: Number
    step: Count
    source: MetricSource
    values: Annotated[dict[MetricName, Number], Field(max_length=MAX_METRICS_PER_ITEM)]
    not_finite: NotRequired[Annotated[dict[MetricName, NotFinite], Field(max_length=MAX_METRICS_PER_ITEM)]]
    left_out: NotRequired[LeftOutMetrics]


class MetricSeries(NamedTuple):
    """Identify the values of one metric from one source on one rank."""

    name: str
    source: str
    rank: int


MAX_ATTEMPT_METRIC_NAMES: Final = 400

_SEPARATORS = re.compile(r"[\s/_.\-]+")
# Canonical names of a training loss, in the order of preference.
_LOSS_NAMES: Final = ("loss", "lm_loss", "global_avg_loss", "loss_metrics_global_avg_loss", "loss_step", "loss_epoch")


def get_canonical_name(name: str) -> str:
    """Return a name that is equal for "loss", "train/loss", "train_loss" and "Loss/train"."""
    words = [word for word in _SEPARATORS.split(name.lower()) if word]
    others = [word for word in words if word not in ("train", "training")]
    return "_".join(others or words)


def is_loss(name: str) -> bool:
    """Return True if a metric is a training loss."""
    return get_canonical_name(name) in _LOSS_NAMES


def _get_source_order(source: str) -> int:
    return METRIC_SOURCES.index(source) if source in METRIC_SOURCES else len(METRIC_SOURCES)


def get_preference(series: MetricSeries) -> tuple[int, int, int]:
    """Return the order of the series of a loss. The smallest one is the loss of a run."""
    return _get_source_order(series.source), _LOSS_NAMES.index(get_canonical_name(series.name)), series.rank


def select_series(series: Iterable[MetricSeries]) -> list[MetricSeries]:
    """Return the series without those that a preferred source reports on the same rank, sorted by name and rank."""
    known = list(series)
    best: dict[tuple[str, int], int] = {}
    for one in known:
        key = get_canonical_name(one.name), one.rank
        best[key] = min(best.get(key, len(METRIC_SOURCES)), _get_source_order(one.source))
    return sorted(one for one in known if _get_source_order(one.source) == best[get_canonical_name(one.name), one.rank])


def find_loss(series: Iterable[MetricSeries]) -> MetricSeries | None:
    """Return the series that is the loss of a run, or None."""
    return min((one for one in series if is_loss(one.name)), key=get_preference, default=None)
