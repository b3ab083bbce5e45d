"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from meshboard.answers.layouts import AutoSpec, Layout
from meshboard.answers.models import SizedModel
from meshboard.answers.specs import JobSpec


class RunnerUp(TypedDict):
    """Alternative layout. `slower` and `heavier` are relative to the chosen layout."""

    layout: Layout
    words: str
    ranks: int
    micro_batches: int
    step_s: float
    memory_bytes: int
    slower: float
    heavier: float


class AutoLayout(TypedDict):
    """Result of a layout "auto": the constraints, the reason, and the runners-up.

    `complete`: false if the limit of layouts ended the search.
    """

    layout: Layout
    words: str
    ranks: int
    micro_batches: int
    step_s: float
    memory_bytes: int
    asked: AutoSpec
    why: str
    cluster: str
    considered: int
    complete: bool
    runners_up: list[RunnerUp]


class AlignedVocabulary(TypedDict):
    """A larger vocabulary, of which a step takes so many seconds less: rows of the head's products begin at multiples
    of 16 bytes then.
    """

    vocab_size: int
    spares_s: float


class ClusterEstimate(TypedDict):
    """Hardware of the ranks. `crossing`: which axes use the network. `assumed_peak`: whether the peak FLOP/s of the
    accelerator is an assumption, as for CPUs and unknown GPUs.
    """

    name: str
    accelerator: str
    assumed_peak: bool
    per_node: int
    nodes: int
    memory_bytes: int
    reserved_bytes: int
    crossing: dict[str, bool]


class Interval(TypedDict):
    """Margin of error of a figure. `words`: the basis of the figure, and the margin.

    `share`: relative margin. Above 1, the figure is correct within a factor of 1 + `share`.
    """

    share: float
    basis: str
    runs: int
    words: str


class TrafficRow(TypedDict):
    """All calls of one op on one group in one step of one rank.

    `between_nodes`: the group spans nodes, so at least a part of its bytes leaves the node.
    """

    op: Literal[
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    ]
    axis: Literal["dp", "pp", "cp", "ep", "tp", "world"]
    group_size: int
    stride: int
    count: int
    payload_bytes: int
    algorithmic_bytes: int
    between_nodes: bool


class StageEstimate(TypedDict):
    """One rank of a pipeline stage; the ranks of a stage send alike. `layers`: first and last + 1 of each chunk.

    `padded_share`: what ZeRO's collectives carry more than the parameters need, over what they need.
    `gradients_bytes`: of a step's gradients, once complete; those in `memory` are of the moment at which a rank
    holds most.
    """

    stage: int
    layers: list[list[int]]
    parameters: int
    padded_share: float
    memory: dict[str, int]
    memory_bytes: int
    traffic: list[TrafficRow]
    step_bytes: dict[str, int]
    gradients_bytes: NotRequired[int]


class Assumption(TypedDict):
    """An assumption about unknown software, and the step time without it as a ratio to the predicted time."""

    words: str
    ratio: float


class TimePart(TypedDict):
    """A part of the step: compute, recompute, an axis' exposed communication, launch, bubble, optimizer.

    Seconds are means of all ranks, as what is measured is. What stages wait for the slowest is pp's.
    """

    name: str
    seconds: float


class TimeEstimate(TypedDict):
    """Parts add up to `step_s`; `forward_s` and both backwards are of one micro-batch on the slowest stage.
    Utilisation is a share of the dense peak of all ranks. `assumptions` of unknown software, with the largest
    effect first.
    """

    step_s: float
    parts: list[TimePart]
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    tokens_per_s: float
    basis: Literal["data sheet", "own figures", "calibrated"]
    interval: Interval
    assumptions: NotRequired[list[Assumption]]


class Estimate(TypedDict):
    """Traffic is exact for what the trainer runs, memory and time are estimates. Sizes in bytes.

    `padded_vocab_size`: rows of the embedding and the head over all tp ranks, of which those from the vocabulary's
    size on are padding; `model_parameters` counts none. `tight`: the fullest rank fits, by less than its peak may
    be off. `host_memory_bytes`: state that memory options move to the CPU memory of the fullest rank. `may_fit`: it
    does not fit, but the interval of its peak contains the memory of the accelerator.
    """

    world_size: int
    axes: dict[str, int]
    model_parameters: int
    vocab_size: int
    padded_vocab_size: int
    active_parameters: int
    micro_batch_size: int
    micro_batches: int
    tokens_per_step: int
    stages: list[StageEstimate]
    peak_memory_bytes: int
    memory_interval: Interval
    rank_bytes: dict[str, dict[str, int]]
    exact_traffic: bool
    cluster: ClusterEstimate
    fits: bool
    time: TimeEstimate
    aligned_vocabulary: NotRequired[AlignedVocabulary]
    host_memory_bytes: NotRequired[int]
    may_fit: NotRequired[bool]
    tight: NotRequired[bool]


class SpecProblem(TypedDict):
    """A problem and its field."""

    field: str
    """Dotted name of a spec field, or 'request' for the whole request."""
    message: str


class Suggestion(TypedDict):
    """A layout that differs in one choice. `step_s` and `memory_bytes` are null if the layout is not allowed."""

    change: str
    fits: bool
    reason: str
    step_s: float | None
    memory_bytes: int | None
    layout: Layout
    micro_batches: int


class Timeline(TypedDict):
    """A pipeline schedule as cells, in seconds. `whole` is false if later stages or micro-batches are left out."""

    stages: int
    micro_batches: int
    whole: bool
    step_s: float
    bubble: float
    in_flight: list[int]
    cells: list[list[int | str | float]]
    """Each cell has rank, kind, micro-batch, chunk, start (s), and end (s)."""


class Plan(TypedDict):
    """The plan of a spec. `estimate` is null while the spec has problems, or if its kind trains no model."""

    estimate: Estimate | None
    problems: list[SpecProblem]
    not_runnable: list[SpecProblem]
    """Spec fields with values that the planner supports, but the trainer does not."""
    choices: dict[str, dict[str, str]]
    """Reasons why options are unavailable: {field: {option: reason}}."""
    chosen: NotRequired[AutoLayout | None]
    matrix: NotRequired[list[list[int]] | None]
    """Algorithmic bytes per step by [sender][receiver], for up to 64 ranks."""
    suggestions: NotRequired[list[Suggestion]]
    """Similar layouts that fit in memory, if this layout does not fit."""
    timeline: NotRequired[Timeline | None]


class FoundLayout(TypedDict):
    """One layout of a search."""

    layout: Layout
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
    basis: Literal["data sheet", "own figures", "calibrated"]


class SearchResult(TypedDict):
    """The fastest layouts, the Pareto front of time and memory, and layouts similar to the first."""

    best: list[FoundLayout]
    pareto: list[FoundLayout]
    neighbours: list[Suggestion]
    considered: int
    """Number of estimated and rejected layouts, of `total`."""
    total: int
    """Number of layouts for these ranks and fixed values."""
    fitting: int
    refused: dict[str, int]
    """Number of rejected layouts, by reason."""
    seconds: float
    complete: bool
    """False if the search stopped at its limit of layouts."""
    cluster: SearchedCluster


class LargestGain(TypedDict):
    """The part of the step that saves the most time, in this run and with the change."""

    part: str
    apportioned_s: float
    there_s: float


class Option(TypedDict):
    """A layout that differs in one setting. `faster`: time saved as a fraction of the measured step."""

    change: str
    layout: Layout
    micro_batches: int
    step_s: float
    faster: float
    memory_bytes: int
    because: LargestGain
    text: str


class Part(TypedDict):
    """A part of the step, in seconds.

    `measured_s`: mean of the traced steps, or null. `measured_at_most_s`: upper limit if no step was traced, or
    null. `apportioned_s`: share of the median step, split as in the traced steps. Without traced steps, it is an
    estimate.
    """

    part: str
    predicted_s: float
    measured_s: float | None
    measured_at_most_s: float | None
    apportioned_s: float


class Advice(TypedDict):
    """Faster layouts for a finished run. `host` is where it ran, and `step_s` is the median of its timed `steps`."""

    text: str
    cluster: str
    step_s: float
    predicted_s: float
    interval: Interval
    parts: list[Part]
    options: list[Option]
    unsure: list[Option]
    steps: int
    host: str


class ImportedModel(TypedDict):
    """The model of a Hugging Face config.json, with its exact parameter count."""

    model: SizedModel
    parameters: int
    active_parameters: int
    """Parameters that process one token."""
    assumed: bool
    """The model type is unknown, and the layers are assumed to be those of Llama."""
    notes: list[str]
    """Fields of the config that the plan leaves out."""
    not_runnable: list[SpecProblem]
    """Spec fields with values that the planner supports, but the trainer does not."""


class ImportedLayout(TypedDict):
    """The layout in the config file of another training tool."""

    tool: str
    ranks: int
    spec: JobSpec
    assumed: list[str]
    """Settings that are not in the file, with the default of the tool."""
    notes: list[str]
    """Settings that the plan represents in another way or leaves out."""
    not_understood: list[str]
    """Settings of the file that were not read."""
