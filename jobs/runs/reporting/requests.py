"""Authenticate and validate the requests of external runs that report to the board."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, TypeVar

from django.contrib.auth.models import User
from pydantic import Field, ValidationError
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from typing_extensions import TypedDict

from contracts.fields import HOST_NAME_PATTERN, Address
from jobs.core.credentials import find_run_token
from jobs.models import RunToken
from jobs.models.validators import NameRule
from jobs.queue.bulk_actions import MAX_TAGS, NewTag
from planner.facts.parse_spec import convert_error
from planner.facts.resources import Device
from planner.facts.spec import Argument
from planner.facts.validation import NO_NUL, SpecError, StrictModel

MAX_NODES = 4096


class OpenedRun(TypedDict):
    """Describe an opened run. `token` is shown once, and is valid for this run until it ends."""

    run: str
    attempt: int
    token: str
    url: str
    nodes: int
    ranks_per_node: int


class NodeJoined(TypedDict):
    """Describe the ranks of a node. `cancel`: end these ranks."""

    node: int
    first_rank: int
    num_ranks: int
    cancel: bool


class ReportResponse(TypedDict):
    """Confirm a report. `cancel`: end your ranks. `now`: Unix seconds of the board's clock."""

    cancel: bool
    status: str
    now: float


class ReadyNode(TypedDict):
    """A node that waits for the others of its gang.

    `port` is the port of the store on the lead node, and 0 on other nodes.
    """

    node: int
    address: str
    port: int


class RendezvousResponse(TypedDict):
    """List the ready nodes of a gang. `cancel`: end your ranks. `now`: Unix seconds of the board's clock."""

    cancel: bool
    now: float
    ready: list[ReadyNode]


AnyRequest = TypeVar("AnyRequest", bound=StrictModel)
NodeName = Annotated[str, Field(pattern=HOST_NAME_PATTERN)]


class RunRequest(StrictModel):
    """Open a run. Each node has the same number of consecutive ranks."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$"), NameRule] = "untitled"
    world_size: int = Field(ge=1, le=65536, description="ranks")
    nodes: int = Field(
        default=1,
        ge=1,
        le=MAX_NODES,
        description="Number of machines. Each machine joins the run with its own request.",
    )
    device: Device = "cpu"
    command: list[Argument] = Field(default=[], max_length=202, description="Command line, for display.")
    tags: list[NewTag] = Field(default=[], max_length=MAX_TAGS)
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
    """Join a run as a node."""

    node: int = Field(ge=0, lt=MAX_NODES, description="Number of the node, starting at 0. Node 0 has rank 0.")
    name: NodeName = Field(description="Name of the machine.")
    claim: str = Field(
        min_length=20,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="Random secret by which the board recognizes the reporting process.",
    )


class RendezvousRequest(StrictModel):
    """Announce that a node of a gang is ready. Without address and port, only ask."""

    address: Address | None = None
    port: int = Field(
        default=0, ge=0, le=65535, description="Port of the rendezvous store on the lead node. Send 0 from other nodes."
    )


def parse_request(model: type[AnyRequest], data: object) -> AnyRequest:
    """Validate a request body. Raise SpecError with all problems if fields are invalid."""
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        raise SpecError([convert_error(error, model) for error in errors.errors(include_url=False)]) from None


SCHEME = "Run"


class RunTokenAuthentication(BaseAuthentication):
    """Authenticate `Authorization: Run TOKEN` as the owner of the run."""

    def authenticate(self, request: Request) -> tuple[User, RunToken]:
        scheme, _, token = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme != SCHEME:
            raise AuthenticationFailed("The run token is missing. Send the header Authorization: Run TOKEN.")
        found = find_run_token(token.strip())
        if found is None:
            raise AuthenticationFailed("The run token is invalid.")
        owner = found.attempt.job.owner
        if not owner.is_active:
            raise AuthenticationFailed("The account of the owner of the run is disabled.")
        return owner, found

    def authenticate_header(self, request: Request) -> str:
        return SCHEME


class RequiresHttps(BasePermission):
    """Require HTTPS for requests that carry or return a run token."""

    message = "The request sends a token over unencrypted HTTP. Use HTTPS."

    def has_permission(self, request: Request, view: Any) -> bool:
        return request.is_secure() or _is_loopback(request)


def _is_loopback(request: Request) -> bool:
    """Return True for a loopback connection without a proxy."""
    if "HTTP_X_FORWARDED_PROTO" in request.META or "HTTP_X_FORWARDED_FOR" in request.META:
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False
