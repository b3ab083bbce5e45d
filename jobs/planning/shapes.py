"""What the planner answers, typed once: `jobs.api.document.schema` describes these to who asks over REST."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from planner.cost.correction import Interval
from planner.cost.estimate import Estimate
from planner.facts.reading.dumped import LayoutDict, ModelDict
from planner.hardware.cluster import Basis
from planner.search.auto import Chosen
from planner.search.hindsight import Hindsight


class Error(TypedDict):
    """What is wrong, and with which field."""

    field: Annotated[str, Field(description="Dotted field of the spec, or 'request'.")]
    message: str


class Suggestion(TypedDict):
    """A layout one choice away; `step_s` and `memory_bytes` are null where it breaks a rule."""

    change: str
    fits: bool
    reason: str
    step_s: float | None
    memory_bytes: int | None
    layout: LayoutDict
    micro_batches: int


class Timeline(TypedDict):
    """A pipeline schedule as cells, in seconds. `whole`: false where only the first stages and micro-batches are."""

    stages: int
    micro_batches: int
    whole: bool
    step_s: float
    bubble: float
    in_flight: list[int]
    cells: Annotated[
        list[tuple[int, str, int, int, float, float]],
        Field(description="Rank, kind, micro-batch, chunk, start (s), end (s)."),
    ]


class Plan(TypedDict):
    """What a spec would cost; `estimate` is null while it has problems, or where it trains nothing."""

    estimate: Estimate | None
    problems: list[Error]
    not_runnable: Annotated[list[Error], Field(description="Fields that the planner supports, but not the trainer.")]
    choices: Annotated[
        dict[str, dict[str, str]], Field(description="{field: {option: reason}} for unavailable options.")
    ]
    suggestions: NotRequired[
        Annotated[list[Suggestion], Field(description="Similar layouts that fit, if this layout does not fit.")]
    ]
    chosen: NotRequired[Chosen | None]
    timeline: NotRequired[Timeline | None]
    matrix: NotRequired[
        Annotated[
            list[list[int]] | None,
            Field(description="[sender][receiver] algorithmic bytes per step, for up to 64 ranks."),
        ]
    ]


class FoundLayout(TypedDict):
    """One line of a search."""

    layout: LayoutDict
    micro_batches: int
    micro_batch_size: int
    step_s: float
    mfu: float
    tokens_per_s: float
    interval: Interval
    memory_bytes: int
    memory_interval: Interval
    runnable: bool


class SearchedCluster(TypedDict):
    """What the search was for; the memory is an accelerator's."""

    name: str
    memory_bytes: int
    basis: Basis


class SearchResult(TypedDict):
    """The best layouts by time; the Pareto front of time and memory; why neighbours of the first were not taken."""

    best: list[FoundLayout]
    pareto: list[FoundLayout]
    neighbours: list[Suggestion]
    considered: int
    fitting: int
    refused: Annotated[dict[str, int], Field(description="Number of layouts, by reason.")]
    seconds: float
    complete: Annotated[bool, Field(description="False if the time limit stopped the search.")]
    cluster: SearchedCluster


class Advice(Hindsight):
    """What one other choice would have made of a run, where it ran, and how many steps were timed: their median is
    `step_s`."""

    steps: int
    host: str


class Smaller(TypedDict):
    """A layout that fits the hosts that are left where the job's own does not, and what a step is predicted to take.

    `was_step_s`: of its own layout, as planned. `checkpoint`: what a run in it goes on from, "" where it begins anew.
    """

    why: str
    layout: LayoutDict
    words: str
    ranks: int
    micro_batches: int
    step_s: float
    was_step_s: float | None
    checkpoint: str


class Template(TypedDict):
    """A published layout, and its twin of CPU size, as the form takes them."""

    id: str
    title: str
    source: str
    cluster: str
    spec: dict[str, Any]
    twin: dict[str, Any]


class Preset(TypedDict):
    """A named model with its exact parameter count."""

    name: str
    description: str
    parameters: int
    model: ModelDict
