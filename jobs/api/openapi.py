"""The OpenAPI document, built from pydantic models of requests and typed dicts of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from pydantic import TypeAdapter
from rest_framework.request import Request
from rest_framework.response import Response

from contracts.hosts import JoinRequest, JoinResponse
from jobs.api.errors import RunEndedProblem
from jobs.api.problems import CONTENT_TYPE, PROBLEM_TYPES, ProblemDetails
from jobs.api.views import APIView
from jobs.core.audit import AuditRow
from jobs.core.job_details import JobBrief, JobDetail, WaitResult
from jobs.people.invitations import AcceptRequest, InvitationDetail, InvitationRequest, NewInvitation
from jobs.people.notifications.email_settings import EmailSettingsRequest
from jobs.people.notifications.payloads import EmailSettings, EndEmail, NewWebhook, WebhookDelivery, WebhookDetail
from jobs.people.notifications.webhooks import WebhookChange, WebhookRequest
from jobs.people.projects import MemberDetail, ProjectChange, ProjectDetail, ProjectRequest, RoleRequest
from jobs.people.tokens import ApiToken, ApiTokenRequest, NewApiToken
from jobs.people.variables import Variable, VariableRequest
from jobs.planning.host_traffic import HostTraffic
from jobs.planning.schemas import (
    Advice,
    ExplainRequest,
    ImportedLayout,
    ImportedModel,
    ImportLayoutRequest,
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
from jobs.planning.uploads import FinishUploadRequest, UploadBrief, UploadDetail, UploadRequest
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
from jobs.runs.script_prediction import ScriptPrediction
from jobs.runs.traces.export import ChromeTrace
from jobs.runs.traces.imports.store import ImportDetail, ImportRequest, UploadedFile
from jobs.runs.traces.trace_events import StepColumns
from jobs.runs.traces.traced_steps import RequestedSteps, TracedSteps, TraceRequest
from planner.cost.measured_steps import MEASURED_STEPS
from planner.explain import Explanation
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.profile import HostProfile
from planner.search.auto_layout import AutoSpec

REQUESTS = (
    *(JobSpec, AutoSpec, Cluster, HostProfile, SearchRequest, ExplainRequest, ImportLayoutRequest),
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
    *(
        UploadRequest,
        FinishUploadRequest,
        ImportRequest,
        ResumeRequest,
        LabRequest,
        BaselineRequest,
        WebhookRequest,
        WebhookChange,
        EmailSettingsRequest,
    ),
)
RESPONSES = (
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
    *(History, TableRows, Snapshot, SlowSteps, Comparison, StoredCheckpoint, Results, ScriptPrediction),
    *(PrimitiveBrief, PrimitiveDetail),
    *(UploadBrief, UploadDetail),
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
        ImportedModel,
        ImportedLayout,
        ProblemDetails,
        RunEndedProblem,
    ),
)
F = TypeVar("F", bound=Callable[..., Any])
COMMON_PROBLEMS = (400, 401, 403, 406, 408, 413, 429, 500, 503)
REFERENCE = "#/components/schemas/{model}"
EXAMPLE = {"name": "ci", "model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}, "train": {"steps": 50}}


@cache
def get_document() -> Any:
    """Return the OpenAPI document."""
    return SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]


def ref(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=name)}


def describe_response(name: str, description: str = "") -> OpenApiResponse:
    return OpenApiResponse(ref(name), description=description)


def describe_problems(*codes: int) -> dict[tuple[int, str], OpenApiResponse]:
    """Return the problem responses of an operation: those of all operations, and `codes`."""
    return {
        (code, CONTENT_TYPE): describe_response(
            "RunEndedProblem" if code == 410 else "ProblemDetails", PROBLEM_TYPES[code].description
        )
        for code in sorted({*COMMON_PROBLEMS, *codes})
    }


def operation(
    operation_id: str,
    response: Any,
    *problems: int,
    request: Any = None,
    parameters: Sequence[OpenApiParameter] = (),
    **options: Any,
) -> Callable[[F], F]:
    """Describe a view method in the OpenAPI document.

    Args:
        response: Schema name or description of a 200 response, or all successful responses by status.
        problems: Statuses of problem responses in addition to COMMON_PROBLEMS.
    """
    if isinstance(response, str):
        response = describe_response(response)
    responses = response if isinstance(response, dict) else {200: response}
    return extend_schema(
        operation_id=operation_id,
        request=request,
        parameters=list(parameters),
        responses={**responses, **describe_problems(*problems)},
        **options,
    )


def describe_list(name: str) -> OpenApiResponse:
    return OpenApiResponse({"type": "array", "items": ref(name)})


def request_body(schema: dict[str, Any], example: object) -> dict[str, Any]:
    """Return a JSON request body with an example."""
    return {"application/json": {**schema, "examples": [example]}}


SUBMIT = request_body({"allOf": [ref("Submission")]}, EXAMPLE)
# A plan reports the problems of a draft, so each JSON value is a valid body.
DRAFT = request_body(
    {"anyOf": [ref("JobSpec"), ref("Draft"), {"description": "An incomplete draft of a spec."}]}, EXAMPLE
)
PATCH = request_body({"type": "object", "additionalProperties": True}, {"layout": {"tp": 4}})
CONFIG = request_body(
    {"type": "object", "additionalProperties": True, "description": "The config.json of a Hugging Face model."},
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
)
LAYOUT_FILE = request_body(
    {"allOf": [ref("ImportLayoutRequest")]},
    {"text": "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 8\n", "ranks": 64},
)
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
    target_class = "jobs.api.access.AsciiTokenAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Token YOUR_TOKEN"}


class RunTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "jobs.runs.reporting.requests.RunTokenAuthentication"
    name = "runToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Run TOKEN_OF_THE_RUN"}


class UploadSecretScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "jobs.api.upload_views.UploadSecretAuthentication"
    name = "uploadSecret"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Upload SECRET_OF_THE_ORDER"}


def add_models(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Add the schemas of models and types to the components, as a hook of drf-spectacular."""
    kinds: list[TypeAdapter[Any]] = [TypeAdapter(kind) for kind in (*REQUESTS, *RESPONSES)]
    _, schemas = TypeAdapter.json_schemas([(kind, "validation", kind) for kind in kinds], ref_template=REFERENCE)
    models = schemas["$defs"]
    sized = models.pop("ModelSpec")
    models |= {"SizedModel": sized, "ModelSpec": _model_or_preset(sized)}
    # Only some kinds of jobs need a model, which the parser checks.
    del models["JobSpec"]["required"]
    models["JobSpec"]["properties"]["layout"] = _layout_or_auto()
    models["Submission"] = _submission(models["JobSpec"])
    models["Draft"] = _draft(models["JobSpec"], models["SearchRequest"])
    for name in ("Preset", "ImportedModel"):
        models[name]["properties"]["model"] = ref("SizedModel")
    models["SearchSpec"] = _without_layout(models["JobSpec"])
    models["StoredSpec"] = _stored_spec(models["JobSpec"])
    models["JobDetail"]["properties"]["spec"] = ref("StoredSpec")
    models["Baseline"]["properties"]["spec"]["anyOf"][0] = ref("StoredSpec")
    models["ImportedLayout"]["properties"]["spec"] = ref("JobSpec")
    models["ExplainRequest"]["properties"]["spec"] = ref("JobSpec")
    models["SearchRequest"]["properties"] |= {"spec": ref("SearchSpec"), "fixed": ref("Layout")}
    for field in ("profile", "runs", "measured_steps"):
        models["Cluster"]["properties"].pop(field)
    models["NamedCluster"] = _named_cluster(models.pop("Cluster"))
    for name, model in models.items():
        models[name] = {**_simplify(model), "title": name}
    result["components"].setdefault("schemas", {}).update(models)
    _require_bodies(result["paths"], models)
    return result


def _simplify(part: Any) -> Any:
    """Return a schema without titles of fields and default objects, which generators of clients handle badly."""
    if isinstance(part, list):
        return [_simplify(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    fields = part.get("properties")
    if isinstance(fields, dict):  # a field can have the name `title`
        fields = {name: _simplify(inner) for name, inner in fields.items()}
    dropped = {"properties", *({"default"} if isinstance(part.get("default"), dict) else ()), "title"}
    result = {name: _simplify(inner) for name, inner in part.items() if name not in dropped}
    return result if fields is None else {**result, "properties": fields}


def _require_bodies(paths: dict[str, Any], models: dict[str, Any]) -> None:
    """Mark request bodies with required fields as required."""
    for operation in (operation for path in paths.values() for operation in path.values()):
        schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        named = [part["$ref"].rpartition("/")[2] for part in (schema, *schema.get("allOf", ())) if "$ref" in part]
        if any(models.get(name, {}).get("required") for name in named):
            operation["requestBody"]["required"] = True


def _model_or_preset(sized: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a requested model: all sizes, or a preset with sizes that override it."""
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
    """Return the schema of a requested layout. A stored spec has the chosen layout."""
    constrained = {
        "type": "object",
        "properties": {"auto": ref("AutoSpec")},
        "required": ["auto"],
        "additionalProperties": False,
    }
    words = 'Parallel layout. With "auto", Meshboard chooses a layout. {"auto": {...}} also sets constraints.'
    return {"anyOf": [ref("Layout"), {"const": "auto"}, constrained], "default": {}, "description": words}


def _stored_spec(spec: dict[str, Any]) -> dict[str, Any]:
    words = "The stored spec, with the chosen layout and the sizes of the model preset."
    properties = {**spec["properties"], "layout": ref("Layout"), "model": ref("SizedModel")}
    return {**spec, "description": words, "properties": properties}


def _submission(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a submit: a spec with `allow_unfit`."""
    words = (
        "With true, Meshboard queues the job even if the lower bound of its memory estimate exceeds the memory of the "
        "device. With false, the answer is 422 in this case."
    )
    allow = {"type": "boolean", "default": False, "description": words}
    return {**spec, "properties": {**spec["properties"], "allow_unfit": allow}}


def _draft(spec: dict[str, Any], search: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a planned spec, with measured steps as in a search."""
    return {**spec, "properties": {**spec["properties"], MEASURED_STEPS: search["properties"][MEASURED_STEPS]}}


def _without_layout(spec: dict[str, Any]) -> dict[str, Any]:
    properties = {**spec["properties"], "layout": {"description": "Ignored. To keep layout values, use `fixed`."}}
    return {**spec, "properties": properties}


def _named_cluster(cluster: dict[str, Any]) -> dict[str, Any]:
    properties = {"id": {"type": "string", "description": "Value to send as `cluster`."}, **cluster["properties"]}
    return {**cluster, "properties": properties, "required": ["id", *cluster["required"]]}


class CreatedObject(NamedTuple):
    """Path of a created object, and runtime expressions (OpenAPI 3, section 4.8.20.4) of its parameters."""

    path: str
    parameters: dict[str, str]


ID = "$response.body#/id"
PROJECT_KEY = {"project": "$request.path.project", "key": ID}
CREATED_OBJECTS = {
    "JobDetail": CreatedObject("/api/v1/jobs/{job_id}", {"job_id": ID}),
    "ProjectDetail": CreatedObject("/api/v1/projects/{project}", {"project": "$response.body#/name"}),
    "NewWebhook": CreatedObject("/api/v1/projects/{project}/webhooks/{key}", PROJECT_KEY),
    "NewInvitation": CreatedObject("/api/v1/projects/{project}/invitations/{key}", PROJECT_KEY),
    "ImportDetail": CreatedObject("/api/v1/imports/{key}", {"key": ID}),
    "UploadDetail": CreatedObject("/api/v1/uploads/{key}", {"key": ID}),
    "NewJoinToken": CreatedObject("/api/v1/join-tokens/{key}", {"key": ID}),
    "NewApiToken": CreatedObject("/api/v1/tokens/{key}", {"key": "$response.body#/key"}),
}


def add_links(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Link 201 responses to operations on the created object, as a hook of drf-spectacular."""
    paths = result["paths"]
    links = {name: _link_operations(paths, created) for name, created in CREATED_OBJECTS.items()}
    result["components"]["links"] = {name: link for found in links.values() for name, link in found.items()}
    for operation in (operation for path in paths.values() for operation in path.values()):
        response = operation["responses"].get("201", {})
        reference = response.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "")
        if found := links.get(reference.rpartition("/")[2], {}):
            response["links"] = {name: {"$ref": f"#/components/links/{name}"} for name in found}
    return result


def _link_operations(paths: dict[str, Any], created: CreatedObject) -> dict[str, Any]:
    return {
        operation["operationId"]: {"operationId": operation["operationId"], "parameters": created.parameters}
        for path, operations in paths.items()
        if path == created.path or path.startswith(f"{created.path}/")
        for operation in operations.values()
        if path.count("{") == len(created.parameters)
    }


class SchemaView(APIView):
    @operation("getSchema", OpenApiResponse({"type": "object"}))
    def get(self, request: Request) -> Response:
        """Return the OpenAPI 3.1 document of this API."""
        return Response(get_document())
