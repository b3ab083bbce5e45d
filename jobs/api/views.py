"""Thin views: check who asks, call the action, shape the answer."""

from __future__ import annotations

import logging
import re

from django.contrib.auth.models import User
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from redis.exceptions import RedisError
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView

from jobs.access import find_job, find_job_to_change, find_job_to_run, may_change_hosts
from jobs.api import schema
from jobs.api.errors import body
from jobs.api.listing import PARAMETERS, narrowed
from jobs.planning import answers
from jobs.planning.elastic import NoOfferError, smaller
from jobs.planning.hindsight import NoAdviceError, advice
from jobs.planning.queries import checked
from jobs.present import job_brief, job_detail
from jobs.queue import actions, several
from planner.facts.spec import Problem, SpecError

log = logging.getLogger(__name__)

LONGEST_KEY = 200
KEY_PATTERN = f"[!-~]{{1,{LONGEST_KEY}}}"
REFUSALS = {
    code: schema.of("RunEnded" if code == 410 else "Errors", text)
    for code, text in {
        400: "not JSON, a senseless parameter, or a malformed request",
        401: "no token, or a wrong one",
        403: "the session lacks its CSRF token, or the user the right",
        404: "no such thing, or not yours",
        406: "only JSON is written",
        408: "the body did not arrive in time",
        409: "the job's state does not allow it",
        410: "the run has ended",
        413: "the body is larger than 1 MB",
        415: "the body is not application/json",
        422: "the spec cannot run, or a field is senseless: every problem with its field and the arithmetic",
        429: "too many submits; see Retry-After",
        500: "something broke on our side; the message quotes an id that the log has too",
        503: "the database is away, or too much is asked at once; see Retry-After",
    }.items()
}
ANYWHERE = (400, 401, 406, 408, 413, 500, 503)
KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "pattern": f"^{KEY_PATTERN}$"},
    OpenApiParameter.HEADER,
    description="the same key and body: the same job",
)
CLUSTER = OpenApiParameter("cluster", str, description="a name of /clusters; by default the one for the spec's device")


def refusals(*codes: int) -> dict[int, OpenApiResponse]:
    """What a route may answer beside its success: what any may, and `codes`."""
    return {code: REFUSALS[code] for code in sorted({*ANYWHERE, *codes})}


def user_of(request: Request) -> User:
    assert isinstance(request.user, User), "every view requires a login"
    return request.user


def refuse(status: int, field: str, message: str) -> Response:
    return Response(body([Problem(field, message)]), status=status)


def refuse_body(request: Request) -> None:
    """What takes no body refuses one, rather than ignore a wish.

    Raises:
        SpecError: naming every field.
    """
    told = request.data
    if not told and told in ({}, None, ""):
        return
    names = list(told) if isinstance(told, dict) else ["request"]
    raise SpecError(
        [Problem(str(name)[:100], "this request takes no body, and so no such field") for name in names[:20]]
    )


class MayChangeHosts(BasePermission):
    def has_permission(self, request: Request, view: APIView) -> bool:
        return may_change_hosts(request.user)


class SubmitThrottle(UserRateThrottle):
    scope = "submit"

    def allow_request(self, request: Request, view: APIView) -> bool:
        if request.method != "POST":
            return True
        try:
            return super().allow_request(request, view)
        except (RedisError, OSError) as error:  # a job is the database's; Redis only counts here
            log.warning("submits are not counted while Redis is away: %s", error)
            return True


class Jobs(APIView):
    """List and submit."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="listJobs",
        parameters=PARAMETERS,
        responses={200: schema.list_of("JobBrief"), **refusals()},
    )
    def get(self, request: Request) -> Response:
        """Your jobs, newest first; staff see everybody's. A Link header with rel="next" leads to the page after it."""
        listed = narrowed(request)
        answer = Response([job_brief(job) for job in listed.jobs])
        if listed.next_query is not None:
            answer["Link"] = f'<{request.build_absolute_uri(request.path)}?{listed.next_query}>; rel="next"'
        return answer

    @extend_schema(
        operation_id="submitJob",
        request=schema.SUBMIT,
        parameters=[KEY],
        responses={
            201: schema.of("JobDetail"),
            200: schema.of("JobDetail", "this key and body were submitted before"),
            **refusals(403, 415, 422, 429),
        },
    )
    def post(self, request: Request) -> Response:
        """Queue a job. A model may be given as {"preset": NAME}."""
        key = request.headers.get("Idempotency-Key")
        if key is not None and not re.fullmatch(KEY_PATTERN, key):
            return refuse(400, "Idempotency-Key", f"must be 1 to {LONGEST_KEY} visible ASCII characters")
        try:
            job, is_new = actions.submit(user_of(request), request.data, key=key)
        except actions.KeyReusedError:
            return refuse(422, "Idempotency-Key", "was used before with another body")
        return Response(job_detail(job), status=201 if is_new else 200)


class JobView(APIView):
    """One job."""

    @extend_schema(operation_id="getJob", responses={200: schema.of("JobDetail"), **refusals(404)})
    def get(self, request: Request, job_id: str) -> Response:
        """Its state, history, estimate and, at the end, the exit report with predicted and measured bytes."""
        return Response(job_detail(find_job(request.user, job_id)))

    @extend_schema(
        operation_id="changeJob",
        request=schema.request_body(schema.ref("JobChange"), {"archived": True, "add_tags": ["baseline"]}),
        responses={200: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def patch(self, request: Request, job_id: str) -> Response:
        """Give it tags, take some away, archive it or bring it back: all of it or nothing. 409 where a job that has not
        ended was to be archived."""
        job = find_job_to_change(request.user, job_id)
        asked = checked(several.JobChange, request.data)
        try:
            several.change(asked, job.id, request.user.get_username())
        except several.NotEndedError:
            return refuse(409, "archived", f"a job that is {job.status} has not ended")
        return Response(job_detail(find_job(request.user, job_id)))


class ActOnJobs(APIView):
    """Several jobs at once."""

    @extend_schema(
        operation_id="actOnJobs",
        request=schema.request_body(schema.ref("Several"), {"action": "tag", "jobs": ["abcdefghij"], "tags": ["ci"]}),
        responses={200: schema.of("Changed"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Cancel, archive, restore, tag or untag jobs; tells which of them it changed, and why not the others: only
        yours, and of those only what has ended is archived."""
        asked = checked(several.Several, request.data)
        changed = several.carry_out(asked, request.user)
        return Response({"changed": changed, "unchanged": several.unchanged(asked, changed, request.user)})


class Cancel(APIView):
    """End a job."""

    @extend_schema(
        operation_id="cancelJob",
        request=None,
        responses={200: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Ask for the end: every process is gone within 15 s."""
        job = find_job_to_change(request.user, job_id)
        refuse_body(request)
        if not actions.cancel(job, request.user.get_username()):
            job.refresh_from_db()
            return refuse(409, "status", f"a job that is {job.status} cannot be cancelled")
        return Response(job_detail(find_job(request.user, job_id)))


class Advice(APIView):
    """What would have been faster."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(operation_id="adviseJob", responses={200: schema.of("Advice"), **refusals(404, 409)})
    def get(self, request: Request, job_id: str) -> Response:
        """Of a job that has ended: which other choice would have been faster where it ran, by how much, and because of
        which part; an estimate on the hardware as planned for at submit. 409 where it says too little."""
        try:
            return Response(advice(find_job(request.user, job_id)))
        except NoAdviceError as error:
            return refuse(409, error.field, str(error))


class SmallerLayout(APIView):
    """Another layout, for the hosts that are left."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(operation_id="offerSmaller", responses={200: schema.of("Smaller"), **refusals(404, 409)})
    def get(self, request: Request, job_id: str) -> Response:
        """Of a job that does not run now and whose layout fits no hosts that are connected: the fastest one that does,
        predicted. 409 where there is nothing to offer."""
        try:
            return Response(smaller(find_job(request.user, job_id)))
        except NoOfferError as error:
            return refuse(409, error.field, str(error))

    @extend_schema(
        operation_id="runSmaller",
        request=None,
        responses={200: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Queue it again in that layout: it goes on from its newest checkpoint, resharded."""
        job = find_job_to_run(request.user, job_id)
        refuse_body(request)
        try:
            if not actions.run_smaller(job, request.user.get_username()):
                return refuse(409, "status", f"a job that is {job.status} cannot be queued again")
        except NoOfferError as error:
            return refuse(409, error.field, str(error))
        return Response(job_detail(find_job(request.user, job_id)))


class Requeue(APIView):
    """Run a job again."""

    @extend_schema(
        operation_id="requeueJob",
        request=None,
        responses={200: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """A new attempt of a job that failed, was lost or cancelled."""
        job = find_job_to_run(request.user, job_id)
        refuse_body(request)
        if not actions.requeue(job, request.user.get_username()):
            return refuse(409, "status", f"a job that is {job.status} cannot be queued again")
        return Response(job_detail(find_job(request.user, job_id)))


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
        return Response(answers.plan(request.data, request.query_params.get("cluster"), user=request.user))


class PlanSearch(APIView):
    """The best layouts."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="searchPlans",
        request=schema.SEARCH,
        responses={200: schema.of("SearchResult"), **refusals(403, 415, 422, 429)},
    )
    def post(self, request: Request) -> Response:
        """Every layout of a model and batch on so many ranks, ranked by time under memory; none is launched."""
        return Response(answers.searched(request.data))


class PlanExplain(APIView):
    """Where a figure comes from."""

    @extend_schema(
        operation_id="explainPlan",
        request=schema.EXPLAIN,
        responses={200: schema.list_of("Explanation"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Each figure of the estimate with its terms: formula, numbers, source."""
        return Response(answers.explained(request.data))


class Clusters(APIView):
    """Hardware to plan for."""

    @extend_schema(operation_id="listClusters", responses={200: schema.list_of("NamedCluster"), **refusals()})
    def get(self, request: Request) -> Response:
        """Every named cluster, with all the planner assumes of it."""
        return Response(answers.clusters())


class Templates(APIView):
    """Published layouts."""

    @extend_schema(operation_id="listTemplates", responses={200: schema.list_of("Template"), **refusals()})
    def get(self, request: Request) -> Response:
        """Layouts as they were published, each with a twin of CPU size."""
        return Response(answers.templates())


class Presets(APIView):
    """Named models."""

    @extend_schema(operation_id="listPresets", responses={200: schema.list_of("Preset"), **refusals()})
    def get(self, request: Request) -> Response:
        """Every preset with its exact parameter count."""
        return Response(answers.presets())


class Schema(APIView):
    """This document."""

    @extend_schema(operation_id="getSchema", responses={200: OpenApiResponse({"type": "object"}), **refusals()})
    def get(self, request: Request) -> Response:
        """The OpenAPI 3.1 document of this API."""
        return Response(schema.document())
