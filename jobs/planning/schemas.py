"""Requests and responses of the planner and of benchmarks of collectives, which the OpenAPI document describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import BaseModel, Field, ValidationError
from typing_extensions import TypedDict

from planner.cost.estimate import Estimate
from planner.cost.learning import Interval
from planner.cost.measured_steps import MeasuredSteps
from planner.facts.collectives import LabPoint
from planner.facts.layout import MAX_RANKS
from planner.facts.parse_spec import LayoutDict, ModelDict, SchemaFrom, convert_error
from planner.facts.spec import LabPrimitive, LabSpec
from planner.facts.tool_layouts.documents import MAX_FILE_BYTES
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel
from planner.hardware.cluster import Basis
from planner.hardware.own_accelerator import OWN_EXAMPLE
from planner.search.auto_layout import AutoLayout
from planner.search.post_run_advice import Hindsight

RequestModel = TypeVar("RequestModel", bound=BaseModel)

Draft = Any  # the parser of the planner validates it, and `jobs.api.openapi` describes it
ClusterName = Annotated[
    str,
    Field(
        max_length=200, pattern=NO_NUL, description=f"A name from `/clusters`, or an own accelerator: {OWN_EXAMPLE}."
    ),
]


class SearchRequest(StrictModel):
    """A search. The layout in `spec` is ignored, and `fixed` has the values that stay."""

    spec: Draft
    ranks: int = Field(ge=1, le=MAX_RANKS)
    cluster: ClusterName | None = None
    fixed: dict[str, Any] = Field(
        default={}, description="Layout fields and their values, which the search does not change."
    )
    max_micro_batch: int = Field(default=16, ge=1, le=1024)
    max_memory_bytes: int | None = Field(default=None, ge=1, le=2**60)
    runnable: bool = Field(default=False, description="Return only layouts that the trainer can run.")
    limit: int = Field(default=20, ge=1, le=100)
    measured_steps: MeasuredSteps


class ExplainRequest(StrictModel):
    """A spec, and the pipeline stage to explain."""

    spec: Draft
    cluster: ClusterName | None = None
    stage: int = Field(default=0, ge=0)
    measured_steps: MeasuredSteps


def validate_request(kind: type[RequestModel], data: object) -> RequestModel:
    """Validate a request. Raises SpecError with every field that is missing, unknown or invalid."""
    if not isinstance(data, Mapping):
        raise SpecError([Problem("request", "The request body is not a JSON object. Send a JSON object.")])
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise SpecError([convert_error(e, kind) for e in error.errors(include_url=False)]) from None


class ImportLayoutRequest(StrictModel):
    """The config file of another training tool."""

    text: str = Field(min_length=1, max_length=MAX_FILE_BYTES, description="Text of the file.")
    ranks: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANKS,
        description="Number of ranks. Needed if the file has none, and has priority over the number in the file.",
    )


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
    considered: Annotated[int, Field(description="Number of estimated and rejected layouts, of `total`.")]
    total: Annotated[int, Field(description="Number of layouts for these ranks and fixed values.")]
    fitting: int
    refused: Annotated[dict[str, int], Field(description="Number of rejected layouts, by reason.")]
    seconds: float
    complete: Annotated[bool, Field(description="False if the search stopped at its limit of layouts.")]
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


class ImportedModel(TypedDict):
    """The model of a Hugging Face config.json, with its exact parameter count."""

    model: ModelDict
    parameters: int
    active_parameters: Annotated[int, Field(description="Parameters that process one token.")]
    assumed: Annotated[
        bool, Field(description="The model type is unknown, and the layers are assumed to be those of Llama.")
    ]
    notes: Annotated[list[str], Field(description="Fields of the config that the plan leaves out.")]
    not_runnable: Annotated[
        list[SpecProblem],
        Field(description="Spec fields with values that the planner supports, but the trainer does not."),
    ]


class ImportedLayout(TypedDict):
    """The layout in the config file of another training tool."""

    tool: str
    ranks: int
    spec: Annotated[
        Draft, Field(description="Sections layout, train, and resources, and the model if the file describes one.")
    ]
    assumed: Annotated[list[str], Field(description="Settings that are not in the file, with the default of the tool.")]
    notes: Annotated[list[str], Field(description="Settings that the plan represents in another way or leaves out.")]
    not_understood: Annotated[list[str], Field(description="Settings of the file that were not read.")]


class PrimitiveBrief(TypedDict):
    """Description of a collective: n ranks, S bytes in the full buffer, alpha seconds per message, B bytes/s."""

    name: LabPrimitive
    title: str
    meaning: str
    call: Annotated[str, Field(description="PyTorch's")]
    time: str
    sent: Annotated[str, Field(description="Bytes that a rank sends in the ideal algorithm.")]
    used_by: list[str]


class FailedBenchmark(TypedDict):
    """Benchmark that failed because the collective returned wrong elements."""

    job: str
    wrong: Annotated[int, Field(description="Number of wrong elements over all sizes, ranks, and calls.")]
    checked: int


class PrimitiveDetail(PrimitiveBrief):
    """Description of a collective, and the newest successful benchmark that you can see, or null."""

    job: str | None
    points: Annotated[
        list[Annotated[dict[str, Any], SchemaFrom(LabPoint)]],
        Field(description="Time, bandwidths, and number of wrong elements for each message size."),
    ]
    failed: Annotated[
        FailedBenchmark | None, Field(description="Latest run with a wrong result, if it is newer than `job`.")
    ]


class LabRequest(StrictModel):
    """Benchmark of one collective."""

    host: str | None = Field(
        default=None, min_length=1, max_length=100, pattern=NO_NUL, description="Default: a connected host."
    )
    ranks: int | None = Field(
        default=None, ge=1, le=65536, description="Default: 4 ranks, or all slots if the host has fewer than 4."
    )
    lab: LabSpec = Field(
        default=LabSpec(),
        description="Message sizes, number of calls, and data type. The field `primitives` is ignored.",
    )
