"""Types of the planner's answers, which `jobs.api.document.schema` puts into the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from planner.cost.estimate import Estimate
from planner.cost.learning import Interval
from planner.facts.parse_spec import LayoutDict, ModelDict
from planner.hardware.cluster import Basis
from planner.search.auto_layout import AutoLayout
from planner.search.post_run_advice import Hindsight


class SpecProblem(TypedDict):
    """A problem and its field."""

    field: Annotated[str, Field(description="Dotted name of a spec field, or 'request' for the whole request.")]
    message: str


class Suggestion(TypedDict):
    """A layout that differs in one choice. `step_s` and `memory_bytes` are null if the layout is not allowed."""

    change: str
    fits: bool
    reason: str
    step_s: float | None
    memory_bytes: int | None
    layout: LayoutDict
    micro_batches: int


class Timeline(TypedDict):
    """A pipeline schedule as cells, in seconds. `whole` is false if later stages or micro-batches are left out."""

    stages: int
    micro_batches: int
    whole: bool
    step_s: float
    bubble: float
    in_flight: list[int]
    cells: Annotated[
        list[tuple[int, str, int, int, float, float]],
        Field(description="Each cell has rank, kind, micro-batch, chunk, start (s), and end (s)."),
    ]


class Plan(TypedDict):
    """The plan of a spec. `estimate` is null while the spec has problems, or if its kind trains no model."""

    estimate: Estimate | None
    problems: list[SpecProblem]
    not_runnable: Annotated[
        list[SpecProblem],
        Field(description="Spec fields with values that the planner supports, but the trainer does not."),
    ]
    choices: Annotated[
        dict[str, dict[str, str]], Field(description="Reasons why options are unavailable: {field: {option: reason}}.")
    ]
    suggestions: NotRequired[
        Annotated[
            list[Suggestion], Field(description="Similar layouts that fit in memory, if this layout does not fit.")
        ]
    ]
    chosen: NotRequired[AutoLayout | None]
    timeline: NotRequired[Timeline | None]
    matrix: NotRequired[
        Annotated[
            list[list[int]] | None,
            Field(description="Algorithmic bytes per step by [sender][receiver], for up to 64 ranks."),
        ]
    ]


class FoundLayout(TypedDict):
    """One layout of a search."""

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
    """The hardware of a search. The memory is that of one accelerator."""

    name: str
    memory_bytes: int
    basis: Basis


class SearchResult(TypedDict):
    """The fastest layouts, the Pareto front of time and memory, and layouts similar to the first."""

    best: list[FoundLayout]
    pareto: list[FoundLayout]
    neighbours: list[Suggestion]
    considered: int
    fitting: int
    refused: Annotated[dict[str, int], Field(description="Number of rejected layouts, by reason.")]
    seconds: float
    complete: Annotated[bool, Field(description="False if the time limit stopped the search.")]
    cluster: SearchedCluster


class Advice(Hindsight):
    """Faster layouts for a finished run. `host` is where it ran, and `step_s` is the median of its timed `steps`."""

    steps: int
    host: str


class SmallerLayout(TypedDict):
    """A layout that fits the available hosts, for a job whose own layout does not, with its predicted step time.

    `was_step_s` is the planned step time of the own layout. `checkpoint` is where a run would resume, "" for a fresh
    start.
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
    """A published layout, and a small copy of it for a CPU."""

    id: str
    title: str
    source: str
    cluster: str
    spec: dict[str, Any]
    twin: dict[str, Any]


class Preset(TypedDict):
    """A model preset with its exact parameter count."""

    name: str
    description: str
    parameters: int
    model: ModelDict
