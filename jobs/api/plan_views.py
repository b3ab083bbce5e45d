"""REST views of the planner and of collectives."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.access import SubmitThrottle
from jobs.api.errors import refuse
from jobs.api.openapi import operation
from jobs.api.views import APIView, get_user
from jobs.core.access import get_visible_jobs
from jobs.core.errors import NotFoundError
from jobs.core.job_details import serialize_job
from jobs.models import Host
from jobs.planning import drafts
from jobs.planning.schemas import FailedBenchmark, LabRequest, PrimitiveBrief, PrimitiveDetail, validate_request
from jobs.queue import actions
from jobs.runs.collectives.descriptions import BY_NAME, PRIMITIVES, CollectiveDescription
from jobs.runs.collectives.results import DEFAULT_RANKS, WrongResult, find_newest, list_hosts, pick_host
from planner.facts.spec import JobSpec

CLUSTER = OpenApiParameter(
    "cluster",
    str,
    description="Cluster name from /clusters, or an own accelerator as in the other plan requests. "
    "Default: the hosts that the job would use, or a cluster of its device.",
)
INSIDE = {name: f"/spec/{name}" for name in JobSpec.model_fields}  # of a body that contains a spec


class PlanView(APIView):
    @operation("plan", "Plan", 415, request=openapi.DRAFT, parameters=[CLUSTER])
    def post(self, request: Request) -> Response:
        """Return the traffic, memory, and step time of a spec, or its problems.

        Traffic is exact if the trainer can run the layout. Memory and time are estimates.
        """
        return Response(drafts.plan_draft(request.data, request.query_params.get("cluster"), user=request.user).plan)


class SearchView(APIView):
    pointers = {**INSIDE, "layout": "/fixed"}
    throttle_classes = [SubmitThrottle]

    @operation("searchPlans", "SearchResult", 415, 422, request=openapi.SEARCH)
    def post(self, request: Request) -> Response:
        """Return the fastest layouts of a model on a number of ranks that fit in memory."""
        return Response(drafts.search_layouts(request.data))


class ExplainView(APIView):
    pointers = INSIDE

    @operation("explainPlan", openapi.describe_list("Explanation"), 415, 422, request=openapi.EXPLAIN)
    def post(self, request: Request) -> Response:
        """Return the terms of each figure in an estimate: formula, numbers, and source."""
        return Response(drafts.explain_draft(request.data))


class ClustersView(APIView):
    @operation("listClusters", openapi.describe_list("NamedCluster"))
    def get(self, request: Request) -> Response:
        """List the named clusters and the measured hosts, with the values that the planner uses."""
        return Response(drafts.list_clusters())


class TemplatesView(APIView):
    @operation("listTemplates", openapi.describe_list("Template"))
    def get(self, request: Request) -> Response:
        """List published layouts, each with a small copy for a CPU."""
        return Response(drafts.list_templates())


class PresetsView(APIView):
    @operation("listPresets", openapi.describe_list("Preset"))
    def get(self, request: Request) -> Response:
        """List the model presets with exact parameter counts."""
        return Response(drafts.list_presets())


class ImportedModelView(APIView):
    pointers = {"config": ""}

    @operation("importModel", "ImportedModel", 415, 422, request=openapi.CONFIG)
    def post(self, request: Request) -> Response:
        """Convert the config.json of a Hugging Face model to the model of a spec.

        A plan accepts the model. `not_runnable` lists the fields that the trainer does not support.
        """
        return Response(drafts.import_model(request.data))


class ImportedLayoutView(APIView):
    @operation("importLayout", "ImportedLayout", 415, 422, request=openapi.LAYOUT_FILE)
    def post(self, request: Request) -> Response:
        """Convert the config file of another training tool to sections of a spec.

        The file can be TOML of torchtitan, arguments of Megatron-LM, or a config of NeMo, DeepSpeed, GPT-NeoX,
        accelerate, Lightning, or nanotron.
        """
        return Response(drafts.import_layout(request.data))


NAME = OpenApiParameter("name", str, OpenApiParameter.PATH, enum=[words.name for words in PRIMITIVES])


class PrimitivesView(APIView):
    @operation("listPrimitives", openapi.describe_list("PrimitiveBrief"))
    def get(self, request: Request) -> Response:
        """List all collectives with description and cost formulas."""
        return Response([_serialize_primitive(words) for words in PRIMITIVES])


class PrimitiveView(APIView):
    pointers = {"resources.host": "/host", "layout": "/ranks", "layout.dp": "/ranks"}
    throttle_classes = [SubmitThrottle]

    @operation("getPrimitive", "PrimitiveDetail", 404, parameters=[NAME])
    def get(self, request: Request, name: str) -> Response:
        """Show a collective with the results of the newest benchmark that you can see.

        `failed` names a newer benchmark that found wrong elements.
        """
        words = _find(name)
        measured, _, wrong = find_newest(get_visible_jobs(request.user), words.name)
        detail: PrimitiveDetail = {
            **_serialize_primitive(words),
            "job": measured.attempt.job_id if measured else None,
            "points": [point.model_dump(mode="json") for point in measured.points] if measured else [],
            "failed": _failed(wrong) if wrong else None,
        }
        return Response(detail)

    @operation(
        "runPrimitive",
        {201: openapi.describe_response("JobDetail")},
        404,
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("LabRequest"), {"ranks": 2}),
        parameters=[NAME],
    )
    def post(self, request: Request, name: str) -> Response:
        """Queue a benchmark of one collective. 409: no host with two slots is connected."""
        words = _find(name)
        body = validate_request(LabRequest, request.data)
        host = _host(body.host)
        if host is None:
            if body.host is None:
                return refuse(409, "host", "No connected host has two slots. Add a host with two or more slots.")
            message = f"No connected host named {body.host} accepts jobs. Use a host from `GET /hosts`."
            return refuse(422, "host", message, "body")
        ranks = body.ranks or min(DEFAULT_RANKS, host.slots)
        spec = {
            "kind": "lab",
            "name": f"{words.title} on {host.name}"[:100],
            "layout": {"dp": ranks},
            "resources": {"device": host.device, "host": host.name},
            "lab": {**body.lab.model_dump(), "primitives": [words.name]},
        }
        job, queued = actions.submit(get_user(request), spec)
        return Response(serialize_job(job, queued), status=201)


def _find(name: str) -> CollectiveDescription:
    words = {str(known): words for known, words in BY_NAME.items()}.get(name)
    if words is None:
        raise NotFoundError("primitive")
    return words


def _host(name: str | None) -> Host | None:
    if name is None:
        return pick_host(list_hosts())
    return next((host for host in list_hosts() if host.name == name), None)


def _failed(found: WrongResult) -> FailedBenchmark:
    return {"job": found.attempt.job_id, "wrong": found.wrong, "checked": found.checked}


def _serialize_primitive(words: CollectiveDescription) -> PrimitiveBrief:
    brief: dict[str, Any] = {
        name: getattr(words, name) for name in ("name", "title", "meaning", "call", "time", "sent")
    }
    uses = [f"{use.strategy}: {use.words}" for use in words.uses]
    return {**brief, "used_by": uses}  # type: ignore[typeddict-item]
