"""The OpenAPI document: what goes in derives from the models that read it, and what comes out from the types of what
is built; every reference resolves."""

from __future__ import annotations

from functools import cache
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiResponse
from pydantic import TypeAdapter

from contracts.hosts import JoinRequest, JoinResponse
from jobs.api.http.errors import RunEndedProblem
from jobs.api.http.problems import ProblemDetails
from jobs.core.audit import AuditRow
from jobs.core.job_details import JobBrief, JobDetail, WaitResult
from jobs.people.invitations import AcceptRequest, InvitationDetail, InvitationRequest, NewInvitation
from jobs.people.notifications.hooks import WebhookChange, WebhookRequest
from jobs.people.notifications.shapes import EmailSettings, EndEmail, NewWebhook, WebhookDelivery, WebhookDetail
from jobs.people.notifications.wishes import EmailSettingsRequest
from jobs.people.projects import MemberDetail, ProjectChange, ProjectDetail, ProjectRequest, RoleRequest
from jobs.people.tokens import ApiToken, ApiTokenRequest, NewApiToken
from jobs.people.variables import Variable, VariableRequest
from jobs.planning.host_traffic import HostTraffic
from jobs.planning.schemas import (
    Advice,
    ExplainRequest,
    LabRequest,
    Plan,
    Preset,
    PrimitiveBrief,
    PrimitiveDetail,
    SearchRequest,
    SearchResult,
    SmallerLayout,
    Template,
)
from jobs.queue.bulk_actions import JobChange, JobsActionRequest, MoveRequest, QueueActionRequest
from jobs.queue.derived_jobs import ResumeRequest
from jobs.queue.hosts.joining import JoinTokenRequest
from jobs.queue.hosts.presentation import HostBrief, HostDetail, JoinTokenDetail, LostAttempts, NewJoinToken
from jobs.queue.view import ActionResult, MoveResult, PauseResult, QueueDetail, WhatIfResult
from jobs.runs.baselines import Baseline, BaselineRequest, BranchBrief
from jobs.runs.history.queries.comparison import Comparison
from jobs.runs.history.queries.results import Results, StoredCheckpoint
from jobs.runs.history.queries.snapshot import Snapshot
from jobs.runs.history.queries.step_breakdown import SlowSteps
from jobs.runs.history.queries.tables import History, TableRows
from jobs.runs.reporting.requests import (
    NodeJoined,
    NodeRequest,
    OpenedRun,
    RendezvousRequest,
    RendezvousResponse,
    ReportResponse,
    RunRequest,
)
from jobs.runs.traces.export import ChromeTrace
from jobs.runs.traces.imports.store import ImportDetail, ImportRequest, UploadedFile
from jobs.runs.traces.traced_steps import RequestedSteps, StepColumns, TracedSteps, TraceRequest
from planner.explain import Explanation
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.profile import HostProfile
from planner.search.auto_layout import AutoSpec

READ = (
    *(JobSpec, AutoSpec, Cluster, HostProfile, SearchRequest, ExplainRequest),
    *(
        JoinRequest,
        JoinTokenRequest,
        RunRequest,
        NodeRequest,
        RendezvousRequest,
        QueueActionRequest,
        MoveRequest,
        TraceRequest,
        JobsActionRequest,
        JobChange,
    ),
    *(ApiTokenRequest, ProjectRequest, ProjectChange, RoleRequest, InvitationRequest, AcceptRequest, VariableRequest),
    *(ImportRequest, ResumeRequest, LabRequest, BaselineRequest, WebhookRequest, WebhookChange, EmailSettingsRequest),
)
TOLD = (
    *(ProjectDetail, MemberDetail, InvitationDetail, NewInvitation, Variable, ApiToken, NewApiToken),
    *(
        JobBrief,
        JobDetail,
        WaitResult,
        HostBrief,
        HostDetail,
        LostAttempts,
        JoinResponse,
        JoinTokenDetail,
        NewJoinToken,
    ),
    *(OpenedRun, NodeJoined, ReportResponse, RendezvousResponse),
    *(History, TableRows, Snapshot, SlowSteps, Comparison, StoredCheckpoint, Results, PrimitiveBrief, PrimitiveDetail),
    *(ImportDetail, UploadedFile, WebhookDetail, NewWebhook, WebhookDelivery, EndEmail, EmailSettings),
    *(
        QueueDetail,
        WhatIfResult,
        ActionResult,
        MoveResult,
        PauseResult,
        AuditRow,
        RequestedSteps,
        ChromeTrace,
        StepColumns,
        TracedSteps,
    ),
    *(Baseline, BranchBrief),
    *(
        Plan,
        SearchResult,
        Explanation,
        Advice,
        HostTraffic,
        SmallerLayout,
        Template,
        Preset,
        ProblemDetails,
        RunEndedProblem,
    ),
)
TEMPLATE = "#/components/schemas/{model}"
EXAMPLE = {"name": "ci", "model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}, "train": {"steps": 50}}


@cache
def document() -> Any:
    """The same for everybody, and until the next start."""
    return SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]


def ref(name: str) -> dict[str, str]:
    return {"$ref": TEMPLATE.format(model=name)}


def of(name: str, words: str = "") -> OpenApiResponse:
    """An answer that is one of READ or TOLD."""
    return OpenApiResponse(ref(name), description=words)


def list_of(name: str) -> OpenApiResponse:
    return OpenApiResponse({"type": "array", "items": ref(name)})


def request_body(schema: dict[str, Any], example: object) -> dict[str, Any]:
    """For `extend_schema(request=...)`."""
    return {"application/json": {**schema, "examples": [example]}}


SUBMIT = request_body({"allOf": [ref("Submission")]}, EXAMPLE)
# What is wrong with a draft is an answer, not a refusal: every JSON value can be asked about.
DRAFT = request_body({"anyOf": [ref("JobSpec"), {"description": "An incomplete draft of a spec."}]}, EXAMPLE)
PATCH = request_body({"type": "object", "additionalProperties": True}, {"layout": {"tp": 4}})
SEARCH = request_body({"allOf": [ref("SearchRequest")]}, {"spec": {"model": {"preset": "gpt-tiny"}}, "ranks": 8})
JOIN_EXAMPLE = {
    "name": "gpu-7",
    "identity": "0123456789abcdef0123456789abcdef",
    "token": "mbj_...",
    "slots": 8,
    "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 85899345920,
    "boot_id": "3c1b2f0e-8f57-4a55-8c58-5f1b1f1f6b0f",
}
JOIN = request_body({"allOf": [ref("JoinRequest")]}, JOIN_EXAMPLE)
TOKEN = request_body({"allOf": [ref("JoinTokenRequest")]}, {"hours": 24, "uses": 1, "note": "gpu-7"})
HOOK_EXAMPLE = {"name": "chat", "url": "https://chat.example/hooks/7", "states": ["failed", "lost"]}
WEBHOOK = request_body({"allOf": [ref("WebhookRequest")]}, HOOK_EXAMPLE)
WANTED_STEP = request_body({"allOf": [ref("TraceRequest")]}, {"step": 120})
EXPLAIN = request_body({"allOf": [ref("ExplainRequest")]}, {"spec": EXAMPLE})


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How a token is sent."""

    target_class = "jobs.api.http.authentication.AsciiTokenAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Token YOUR_TOKEN"}


class RunTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How a run's own token is sent."""

    target_class = "jobs.runs.reporting.requests.RunTokenAuthentication"
    name = "runToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Run TOKEN_OF_THE_RUN"}


def with_models(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """drf-spectacular's hook: the models and types join the components."""
    kinds: list[TypeAdapter[Any]] = [TypeAdapter(kind) for kind in (*READ, *TOLD)]
    _, told = TypeAdapter.json_schemas([(kind, "validation", kind) for kind in kinds], ref_template=TEMPLATE)
    models = told["$defs"]
    sized = models.pop("ModelSpec")
    models |= {"SizedModel": sized, "ModelSpec": _model_or_preset(sized)}
    # A lab and a script name no model; that other kinds need one is the parser's to say.
    del models["JobSpec"]["required"]
    models["JobSpec"]["properties"]["layout"] = _layout_or_auto()
    models["Submission"] = _submission(models["JobSpec"])
    models["Preset"]["properties"]["model"] = ref("SizedModel")
    models["SearchSpec"] = _without_layout(models["JobSpec"])
    models["StoredSpec"] = _stored(models["JobSpec"])
    models["JobDetail"]["properties"]["spec"] = ref("StoredSpec")
    models["Baseline"]["properties"]["spec"]["anyOf"][0] = ref("StoredSpec")
    models["ExplainRequest"]["properties"]["spec"] = ref("JobSpec")
    models["SearchRequest"]["properties"] |= {"spec": ref("SearchSpec"), "fixed": ref("Layout")}
    for measured in ("profile", "runs"):
        models["Cluster"]["properties"].pop(measured)
    models["NamedCluster"] = _named(models.pop("Cluster"))
    for name, model in models.items():
        models[name] = {**_for_generators(model), "title": name}
    result["components"].setdefault("schemas", {}).update(models)
    _require_bodies(result["paths"], models)
    return result


def _for_generators(part: Any) -> Any:
    """Without what generators of clients stumble over: pydantic's titles, after which they name classes, several alike,
    and defaults that are objects, whose fields have defaults of their own."""
    if isinstance(part, list):
        return [_for_generators(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    fields = part.get("properties")
    if isinstance(fields, dict):  # of which one may be called title
        fields = {name: _for_generators(inner) for name, inner in fields.items()}
    left_out = {"properties", *({"default"} if isinstance(part.get("default"), dict) else ()), "title"}
    kept = {name: _for_generators(inner) for name, inner in part.items() if name not in left_out}
    return kept if fields is None else {**kept, "properties": fields}


def _require_bodies(paths: dict[str, Any], models: dict[str, Any]) -> None:
    """A body whose model has a field that must be there must be there itself."""
    for operation in (operation for path in paths.values() for operation in path.values()):
        told = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        named = [part["$ref"].rpartition("/")[2] for part in (told, *told.get("allOf", ())) if "$ref" in part]
        if any(models.get(name, {}).get("required") for name in named):
            operation["requestBody"]["required"] = True


def _model_or_preset(sized: dict[str, Any]) -> dict[str, Any]:
    """A model as it may be asked for: every size, or a preset with the sizes that differ from it."""
    preset = {
        "type": "string",
        "enum": list(PRESETS),
        "description": "Name of a model preset. Other model fields override its values.",
    }
    return {
        **{name: value for name, value in sized.items() if name != "required"},
        "properties": {**sized["properties"], "preset": {"anyOf": [preset, {"type": "null"}], "default": None}},
        "anyOf": [
            {"required": sized["required"]},
            {"required": ["preset"], "properties": {"preset": {"type": "string"}}},
        ],
    }


def _layout_or_auto() -> dict[str, Any]:
    """A layout as it may be asked for; a stored spec has the one that was chosen."""
    constrained = {
        "type": "object",
        "properties": {"auto": ref("AutoSpec")},
        "required": ["auto"],
        "additionalProperties": False,
    }
    words = 'Parallel layout. With "auto", Meshboard chooses a layout. {"auto": {...}} also sets constraints.'
    return {"anyOf": [ref("Layout"), {"const": "auto"}, constrained], "default": {}, "description": words}


def _stored(spec: dict[str, Any]) -> dict[str, Any]:
    words = "The stored spec, with the chosen layout and the sizes of the model preset."
    properties = {**spec["properties"], "layout": ref("Layout"), "model": ref("SizedModel")}
    return {**spec, "description": words, "properties": properties}


def _submission(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a submit: the spec, and `allow_unfit`."""
    words = (
        "With true, Meshboard queues the job even if the lower bound of its memory estimate exceeds the memory of the "
        "device. With false, the answer is 422 in this case."
    )
    allow = {"type": "boolean", "default": False, "description": words}
    return {**spec, "properties": {**spec["properties"], "allow_unfit": allow}}


def _without_layout(spec: dict[str, Any]) -> dict[str, Any]:
    properties = {**spec["properties"], "layout": {"description": "Ignored. To keep layout values, use `fixed`."}}
    return {**spec, "properties": properties}


def _named(cluster: dict[str, Any]) -> dict[str, Any]:
    properties = {"id": {"type": "string", "description": "Value to send as `cluster`."}, **cluster["properties"]}
    return {**cluster, "properties": properties, "required": ["id", *cluster["required"]]}
