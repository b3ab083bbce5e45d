"""REST of jobs: thin views that check who asks, call the action and shape the answer."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.deprecation import OFFSET, mark
from jobs.api.http.keys import KEY, key_of
from jobs.api.http.tagged import IF_NONE_MATCH, UNCHANGED, tagged
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.jobs.listing import PARAMETERS, narrowed
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.access import find_job, find_job_to_change, find_job_to_run
from jobs.core.job_details import serialize_job
from jobs.models import describe_status
from jobs.planning.auto_layout import NoOfferError, find_smaller_layout
from jobs.planning.host_traffic import compute_host_traffic
from jobs.planning.measured_runs import NoAdviceError, compute_advice
from jobs.planning.schemas import validate_request
from jobs.queue import actions, bulk_actions


class Jobs(APIView):
    """List and submit."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="listJobs",
        parameters=[*PARAMETERS, IF_NONE_MATCH],
        responses={200: schema.list_of("JobBrief"), **UNCHANGED, **refusals()},
    )
    def get(self, request: Request) -> Response:
        """Your jobs, newest first; staff see everybody's. A Link header with rel="next" leads to the page after it."""
        listed = narrowed(request)
        answer = tagged(request, listed.jobs)
        if listed.next_query is not None:
            answer["Link"] = f'<{request.build_absolute_uri(request.path)}?{listed.next_query}>; rel="next"'
        if "offset" in request.query_params:
            mark(answer, OFFSET)
        return answer

    @extend_schema(
        operation_id="submitJob",
        request=schema.SUBMIT,
        parameters=[KEY],
        responses={
            201: schema.of("JobDetail"),
            200: schema.of("JobDetail", "The job of the first request with this key and body."),
            **refusals(403, 415, 422, 429),
        },
    )
    def post(self, request: Request) -> Response:
        """Queue a job. A model may be given as {"preset": NAME}."""
        key = key_of(request)
        try:
            job, queued = actions.submit(user_of(request), request.data, key=key)
        except actions.KeyReusedError:
            return refuse(
                422, KEY.name, f"`{KEY.name}` was used before with another body. Use a new idempotency key.", "header"
            )
        return Response(serialize_job(job, queued), status=201 if queued else 200)


class JobView(APIView):
    """One job."""

    @extend_schema(
        operation_id="getJob",
        parameters=[IF_NONE_MATCH],
        responses={200: schema.of("JobDetail"), **UNCHANGED, **refusals(404)},
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Its state, history, estimate and, at the end, the exit report with predicted and measured bytes."""
        return tagged(request, serialize_job(find_job(request.user, job_id)))

    @extend_schema(
        operation_id="changeJob",
        request=schema.request_body(schema.ref("JobChange"), {"archived": True, "add_tags": ["baseline"]}),
        responses={200: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def patch(self, request: Request, job_id: str) -> Response:
        """Give it tags, take some away, archive it or bring it back: all of it or nothing. 409 where a job that has not
        ended was to be archived."""
        job = find_job_to_change(request.user, job_id)
        asked = bulk_actions.parse_job_change(request.data)
        try:
            bulk_actions.change_job(asked, job.id, request.user.get_username())
        except bulk_actions.NotEndedError:
            return refuse(
                409, "archived", f"The job {describe_status(job.status)}. Wait until the job has ended, or cancel it."
            )
        return Response(serialize_job(find_job(request.user, job_id)))


class ActOnJobs(APIView):
    """Several jobs at once."""

    @extend_schema(
        operation_id="actOnJobs",
        request=schema.request_body(
            schema.ref("JobsActionRequest"), {"action": "tag", "jobs": ["abcdefghij"], "tags": ["ci"]}
        ),
        responses={200: schema.of("ActionResult"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Cancel, archive, restore, tag or untag jobs; tells which of them it changed, and why not the others: only
        yours, and of those only what has ended is archived."""
        asked = validate_request(bulk_actions.JobsActionRequest, request.data)
        changed = bulk_actions.apply_action(asked, request.user)
        return Response({"changed": changed, "unchanged": bulk_actions.list_unchanged(asked, changed, request.user)})


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
            return refuse(409, "status", f"The job cannot be cancelled because it {describe_status(job.status)}.")
        return Response(serialize_job(find_job(request.user, job_id)))


class Advice(APIView):
    """What would have been faster."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(operation_id="adviseJob", responses={200: schema.of("Advice"), **refusals(404, 409)})
    def get(self, request: Request, job_id: str) -> Response:
        """Of a job that has ended: which other choice would have been faster where it ran, by how much, and because of
        which part; an estimate on the hardware as planned for at submit. 409 where it says too little."""
        try:
            return Response(compute_advice(find_job(request.user, job_id)))
        except NoAdviceError as error:
            return refuse(409, error.field, str(error))


class BetweenHosts(APIView):
    """What a run sends between hosts."""

    @extend_schema(operation_id="betweenHosts", responses={200: schema.of("HostTraffic"), **refusals(404)})
    def get(self, request: Request, job_id: str) -> Response:
        """Payload bytes of the current attempt's steps by axis, and by level where dp has two (HSDP, experts): those of
        groups with members on several hosts apart from those inside one; predicted, and measured once it has ended."""
        return Response(compute_host_traffic(find_job(request.user, job_id)))


class SmallerLayout(APIView):
    """Another layout, for the hosts that are left."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(operation_id="offerSmaller", responses={200: schema.of("SmallerLayout"), **refusals(404, 409)})
    def get(self, request: Request, job_id: str) -> Response:
        """Of a job that does not run now and whose layout fits no hosts that are connected: the fastest one that does,
        predicted. 409 where there is nothing to offer."""
        try:
            return Response(find_smaller_layout(find_job(request.user, job_id)))
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
            if not actions.requeue_smaller(job, request.user.get_username()):
                return refuse(409, "status", f"The job cannot be retried because it {describe_status(job.status)}.")
        except NoOfferError as error:
            return refuse(409, error.field, str(error))
        except actions.DisprovedError as error:
            return refuse(409, "proof", str(error))
        return Response(serialize_job(find_job(request.user, job_id)))


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
        try:
            if not actions.requeue(job, request.user.get_username()):
                return refuse(409, "status", f"The job cannot be retried because it {describe_status(job.status)}.")
        except actions.DisprovedError as error:
            return refuse(409, "proof", str(error))
        return Response(serialize_job(find_job(request.user, job_id)))
