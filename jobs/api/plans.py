"""REST of the planner: cost before running, the best layouts, and what there is to choose from."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.shared import refusals
from jobs.planning import drafts
from planner.facts.spec import JobSpec

CLUSTER = OpenApiParameter(
    "cluster",
    str,
    description="Cluster name from /clusters. Default: the hosts that the job would use, or a cluster of its device.",
)
INSIDE = {name: f"/spec/{name}" for name in JobSpec.model_fields}  # of a body that has a spec in it


class Plan(APIView):
    """Cost before running."""

    @extend_schema(
        operation_id="plan",
        request=schema.DRAFT,
        parameters=[CLUSTER],
        responses={200: schema.of("Plan"), **refusals(403, 415)},
    )
    def post(self, request: Request) -> Response:
        """Traffic (exact where the trainer runs the layout), memory and time (estimates) of a spec, or its problems."""
        return Response(drafts.plan_draft(request.data, request.query_params.get("cluster"), user=request.user).plan)


class PlanSearch(APIView):
    """The best layouts."""

    places = {**INSIDE, "layout": "/fixed"}
    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="searchPlans",
        request=schema.SEARCH,
        responses={200: schema.of("SearchResult"), **refusals(403, 415, 422, 429)},
    )
    def post(self, request: Request) -> Response:
        """Every layout of a model and batch on so many ranks, ranked by time under memory; none is launched."""
        return Response(drafts.search_layouts(request.data))


class PlanExplain(APIView):
    """Where a figure comes from."""

    places = INSIDE

    @extend_schema(
        operation_id="explainPlan",
        request=schema.EXPLAIN,
        responses={200: schema.list_of("Explanation"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Each figure of the estimate with its terms: formula, numbers, source."""
        return Response(drafts.explain_draft(request.data))


class Clusters(APIView):
    """Hardware to plan for."""

    @extend_schema(operation_id="listClusters", responses={200: schema.list_of("NamedCluster"), **refusals()})
    def get(self, request: Request) -> Response:
        """Every named cluster, with all the planner assumes of it."""
        return Response(drafts.list_clusters())


class Templates(APIView):
    """Published layouts."""

    @extend_schema(operation_id="listTemplates", responses={200: schema.list_of("Template"), **refusals()})
    def get(self, request: Request) -> Response:
        """Layouts as they were published, each with a twin of CPU size."""
        return Response(drafts.list_templates())


class Presets(APIView):
    """Named models."""

    @extend_schema(operation_id="listPresets", responses={200: schema.list_of("Preset"), **refusals()})
    def get(self, request: Request) -> Response:
        """Every preset with its exact parameter count."""
        return Response(drafts.list_presets())
