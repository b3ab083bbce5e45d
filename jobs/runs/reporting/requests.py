"""What a run that reports itself asks for, checked field by field."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from contracts.fields import HOST_NAME_PATTERN, Address
from jobs.models.names import Named
from jobs.queue.tags_and_archive import MOST_TAGS, NewTag
from planner.facts.parse_spec import convert_error
from planner.facts.resources import Device
from planner.facts.spec import Argument
from planner.facts.validation import NO_NUL, SpecError, StrictModel

MOST_NODES = 4096


class OpenedRun(TypedDict):
    """A run to report. `token` is shown this once: good for this run, while it lasts."""

    run: str
    attempt: int
    token: str
    url: str
    nodes: int
    ranks_per_node: int


class NodeJoined(TypedDict):
    """Who speaks for which ranks. `cancel`: end them."""

    node: int
    first_rank: int
    num_ranks: int
    cancel: bool


class Heard(TypedDict):
    """It was taken. `cancel`: end your ranks. `now`: unix seconds by the board's clock."""

    cancel: bool
    status: str
    now: float


class ReadyNode(TypedDict):
    """A node that waits for the others of its gang. `port`: Port of the store on the lead node. 0 on other nodes.."""

    node: int
    address: str
    port: int


class Met(TypedDict):
    """Who of a gang is ready. `cancel`: end your ranks. `now`: unix seconds by the board's clock."""

    cancel: bool
    now: float
    ready: list[ReadyNode]


Asked = TypeVar("Asked", bound=StrictModel)
NodeName = Annotated[str, Field(pattern=HOST_NAME_PATTERN)]


class RunRequest(StrictModel):
    """A run to be reported. Ranks fill node after node, as many on each."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$"), Named] = "untitled"
    world_size: int = Field(ge=1, le=65536, description="ranks")
    nodes: int = Field(
        default=1,
        ge=1,
        le=MOST_NODES,
        description="Number of machines. Each machine joins the run with its own request.",
    )
    device: Device = "cpu"
    command: list[Argument] = Field(default=[], max_length=202, description="Command line, for display.")
    tags: list[NewTag] = Field(default=[], max_length=MOST_TAGS)
    spec: dict[str, Any] | None = Field(
        default=None, description="Spec of a training job. Meshboard then shows predictions next to the measurements."
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=NO_NUL,
        description="Key of the run. Requests with the same key return the same run, so every node can send one.",
    )


class NodeRequest(StrictModel):
    """A node of a run speaks up."""

    node: int = Field(ge=0, lt=MOST_NODES, description="Number of the node, starting at 0. Node 0 has rank 0.")
    name: NodeName = Field(description="Name of the machine.")
    claim: str = Field(
        min_length=20,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="Random secret by which the board recognizes the reporting process.",
    )


class MeetRequest(StrictModel):
    """A node of a gang is ready, and where; with neither it only asks."""

    address: Address | None = None
    port: int = Field(
        default=0, ge=0, le=65535, description="Port of the rendezvous store on the lead node. Send 0 from other nodes."
    )


def read(model: type[Asked], data: object) -> Asked:
    """
    Raises:
        SpecError: with every problem.
    """
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        raise SpecError([convert_error(error, model) for error in errors.errors(include_url=False)]) from None
