"""REST of baselines: runs that the gate holds others to, by project and branch."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models.validators import MAX_BRANCH_CHARACTERS, find_branch_problem
from jobs.planning.schemas import validate_request
from jobs.runs import baselines

PROJECT = OpenApiParameter("project", {"type": "string", "minLength": 1, "maxLength": 100}, OpenApiParameter.PATH)
BRANCH = OpenApiParameter(
    "branch",
    {"type": "string", "maxLength": MAX_BRANCH_CHARACTERS},
    OpenApiParameter.PATH,
    description="A valid Git branch name.",
)


class Baselines(APIView):
    """Branches."""

    @extend_schema(
        operation_id="listBaselines",
        parameters=[PROJECT],
        responses={200: schema.list_of("BranchBrief"), **refusals(404)},
    )
    def get(self, request: Request, project: str) -> Response:
        """Branches of a project that have a baseline. In the project `default` everybody has branches of their own."""
        return Response(baselines.list_branches(user_of(request), _stored(project)))


class BaselineView(APIView):
    """Runs of one."""

    of_path = ("branch",)

    @extend_schema(
        operation_id="getBaseline",
        parameters=[PROJECT, BRANCH],
        responses={200: schema.of("Baseline"), **refusals(404)},
    )
    def get(self, request: Request, project: str, branch: str) -> Response:
        """What the newest runs of a branch measured, at most 20."""
        return Response(baselines.get_baseline(user_of(request), _stored(project), _stored(branch, "baseline")))

    @extend_schema(
        operation_id="setBaseline",
        parameters=[PROJECT, BRANCH],
        request=schema.request_body(schema.ref("BaselineRequest"), {"job": "abcdefghij"}),
        responses={200: schema.of("Baseline"), **refusals(403, 404, 409, 415, 422)},
    )
    def put(self, request: Request, project: str, branch: str) -> Response:
        """Hold builds to this run too: what it measured is kept, and stays when the job is forgotten. The newest 20 of
        a branch tell its noise. 409: the job did not succeed. Takes an operator of the project."""
        wish = validate_request(baselines.BaselineRequest, request.data)
        if words := find_branch_problem(branch):
            return refuse(422, "branch", words, "path")
        try:
            return Response(baselines.add_run(user_of(request), _stored(project), branch, wish.job))
        except baselines.NotUsableError as error:
            return refuse(409, "job", str(error))

    @extend_schema(
        operation_id="forgetBaseline",
        parameters=[PROJECT, BRANCH],
        request=None,
        responses={204: None, **refusals(403, 404, 415, 422)},
    )
    def delete(self, request: Request, project: str, branch: str) -> Response:
        """Forget all runs of a branch. Takes an operator of the project."""
        refuse_body(request)
        baselines.delete_baseline(user_of(request), _stored(project), _stored(branch, "baseline"))
        return Response(status=204)


def _stored(name: str, what: str = "project") -> str:
    """Raises MissingError: no database can be asked for it."""
    if not is_storable(name):
        raise NotFoundError(what)
    return name
