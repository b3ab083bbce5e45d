"""REST views of jobs: lists, actions, copies, resumed jobs, and checkpoints."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import django_filters
from django.db.models import Q, QuerySet
from django.http import QueryDict
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.access import SubmitThrottle
from jobs.api.errors import refuse, reject_body
from jobs.api.openapi import describe_problems, operation
from jobs.api.parameters import KEY, OFFSET, BadParameterError, get_idempotency_key
from jobs.api.plan_views import INSIDE
from jobs.api.views import IF_NONE_MATCH, NOT_MODIFIED, APIView, get_user, make_tagged_response
from jobs.core.access import find_job, find_job_to_change, find_job_to_run, get_visible_jobs
from jobs.core.filters import JobFilter, MultiValueFilter
from jobs.core.job_details import JobBrief, get_job_briefs, serialize_job
from jobs.core.text import format_number_problem, is_storable, parse_whole_number
from jobs.models import Job, describe_status
from jobs.planning.auto_layout import find_smaller_layout
from jobs.planning.host_traffic import compute_host_traffic
from jobs.planning.measured_runs import compute_advice
from jobs.planning.schemas import validate_request
from jobs.queue import actions, bulk_actions, derived_jobs
from jobs.runs.history.queries.results import list_checkpoints
from planner.facts.validation import Problem

DEFAULT_PAGE_ROWS, MAX_PAGE_ROWS = 50, 200
MAX_OFFSET = 1_000_000
CURSOR = re.compile(r"[A-Za-z0-9_-]{1,200}")
HELP = {
    "q": "Text in the job name, or a complete job id.",
    "status": "Statuses, separated by commas. `active` stands for all statuses of jobs that have not ended.",
    "kind": "Kinds, separated by commas.",
    "project": "Project.",
    "tag": "Tags, separated by commas. The jobs have all of these tags, or one tag that contains the commas.",
    "whose": "`mine` returns only your own jobs.",
    "owner": "User name of the owner.",
    "archived": "`only` returns archived jobs, and `too` returns all jobs. Default: jobs that are not archived.",
}


class JobPage(NamedTuple):
    """A page of jobs. `next_query` is the query of the next page, None for the last page."""

    jobs: list[JobBrief]
    next_query: str | None


def list_page(request: Request) -> JobPage:
    """Return the newest visible jobs that match the query.

    Raises:
        BadParameterError: Parameters are invalid. It names each of them.
    """
    params = request.query_params
    problems = []
    limit = parse_whole_number(params.get("limit", str(DEFAULT_PAGE_ROWS)), 1, MAX_PAGE_ROWS)
    offset = parse_whole_number(params.get("offset", "0"), 0, MAX_OFFSET)
    if limit is None:
        problems.append(Problem("limit", format_number_problem("limit", params["limit"], 1, MAX_PAGE_ROWS)))
    if offset is None:
        problems.append(Problem("offset", format_number_problem("offset", params["offset"], 0, MAX_OFFSET)))
    after = _parse_cursor(params["cursor"]) if "cursor" in params else None
    if "cursor" in params and after is None:
        problems.append(
            Problem("cursor", "`cursor` is invalid. Use the cursor in the Link header of the previous page.")
        )
    if "cursor" in params and "offset" in params:
        problems.append(
            Problem("offset", "`offset` and `cursor` cannot be used together. Use only one of these parameters.")
        )
    problems += [
        Problem(name, f"`{name}` is empty. Give a value, or omit the parameter.")
        for name in HELP
        if name in params and not params[name].strip()
    ]
    filters = JobFilter(params, queryset=get_visible_jobs(request.user), user=request.user)
    problems += [Problem(name, " ".join(messages)) for name, messages in filters.form.errors.items()]
    if problems or limit is None or offset is None:
        raise BadParameterError(problems)
    found: QuerySet[Job] = filters.qs.order_by("-created", "-id")
    if after is not None:
        created, job = after
        found = found.filter(Q(created__lt=created) | Q(created=created, id__lt=job))
    jobs = get_job_briefs(found[offset : offset + limit + 1])
    return JobPage(jobs[:limit], _build_next_query(params, jobs[limit - 1]) if len(jobs) > limit else None)


def _build_next_query(params: QueryDict, last: JobBrief) -> str:
    """Return the query of the page after a job. New jobs do not shift it."""
    following = params.copy()
    following.pop("offset", None)
    following["cursor"] = urlsafe_b64encode(f"{last['created']} {last['id']}".encode()).decode().rstrip("=")
    return following.urlencode()


def _parse_cursor(cursor: str) -> tuple[datetime, str] | None:
    """Return the creation time and id of the last job of the previous page, or None for an invalid cursor."""
    if not CURSOR.fullmatch(cursor):
        return None
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        created, _, job = text.partition(" ")
        found = datetime.fromisoformat(created)
        if found.tzinfo is None or not is_storable(job):
            return None
        return found.astimezone(UTC), job
    except (ValueError, OverflowError):  # OverflowError: the year is outside the range of UTC
        return None


def _schema(known: django_filters.Filter) -> dict[str, Any]:
    choices = known.extra.get("choices")
    if isinstance(known, MultiValueFilter):
        names = [name for name, _ in choices]
        word = f"({'|'.join([*names, *known.extra['aliases']])})"
        one, several = {"enum": names}, {"pattern": f"^{word}(,{word})*$"}
        return {"anyOf": [{"type": "string", **one}, {"type": "string", **several}]}
    if choices is not None:
        return {"type": "string", "enum": [name for name, _ in choices]}
    return {
        "type": "string",
        "minLength": 1,
        "maxLength": known.extra["max_length"],
        # Python also strips characters that are no spaces in ECMAScript.
        "pattern": r"^[^\x00]*[^\s\x00\x1c-\x1f\x85][^\x00]*$",
    }


PARAMETERS = [
    OpenApiParameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ROWS, "default": DEFAULT_PAGE_ROWS},
        description="Maximum number of jobs to return, newest first.",
    ),
    OpenApiParameter(
        "offset",
        {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET, "default": 0},
        description=f"Number of newest jobs to skip. {OFFSET.description}",
        deprecated=True,
    ),
    OpenApiParameter(
        "cursor",
        {"type": "string", "pattern": f"^{CURSOR.pattern}$"},
        description='Start of the page. Use the cursor in the Link header (rel="next") of the previous page.',
    ),
    *(OpenApiParameter(name, _schema(known), description=HELP[name]) for name, known in JobFilter.base_filters.items()),
]


class JobsView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation(
        "listJobs", {200: openapi.describe_list("JobBrief"), **NOT_MODIFIED}, parameters=[*PARAMETERS, IF_NONE_MATCH]
    )
    def get(self, request: Request) -> Response:
        """List your jobs, newest first. Staff see all jobs.

        A Link header with rel="next" leads to the next page.
        """
        listed = list_page(request)
        answer = make_tagged_response(request, listed.jobs)
        if listed.next_query is not None:
            answer["Link"] = f'<{request.build_absolute_uri(request.path)}?{listed.next_query}>; rel="next"'
        if "offset" in request.query_params:
            OFFSET.add_headers(answer)
        return answer

    @operation(
        "submitJob",
        {
            201: openapi.describe_response("JobDetail"),
            200: openapi.describe_response("JobDetail", "The job of the first request with this key and body."),
        },
        415,
        422,
        request=openapi.SUBMIT,
        parameters=[KEY],
    )
    def post(self, request: Request) -> Response:
        """Queue a job. A model can be {"preset": NAME}."""
        key = get_idempotency_key(request)
        try:
            job, queued = actions.submit(get_user(request), request.data, key=key)
        except actions.KeyReusedError:
            return refuse(
                422, KEY.name, f"`{KEY.name}` was used before with another body. Use a new idempotency key.", "header"
            )
        return Response(serialize_job(job, queued), status=201 if queued else 200)


class JobView(APIView):
    @operation("getJob", {200: openapi.describe_response("JobDetail"), **NOT_MODIFIED}, 404, parameters=[IF_NONE_MATCH])
    def get(self, request: Request, job_id: str) -> Response:
        """Show a job with its state, history, and estimate.

        After the end of the job, the exit report has the predicted and measured bytes.
        """
        return make_tagged_response(request, serialize_job(find_job(request.user, job_id)))

    @operation(
        "changeJob",
        "JobDetail",
        404,
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("JobChange"), {"archived": True, "add_tags": ["baseline"]}),
    )
    def patch(self, request: Request, job_id: str) -> Response:
        """Add or remove tags of a job, archive the job, or restore it. The request applies all changes or none.

        409: the job has not ended, so it cannot be archived.
        """
        job = find_job_to_change(request.user, job_id)
        job_change = bulk_actions.parse_job_change(request.data)
        try:
            bulk_actions.change_job(job_change, job.id, request.user.get_username())
        except bulk_actions.NotEndedError:
            return refuse(
                409, "archived", f"The job {describe_status(job.status)}. Wait until the job has ended, or cancel it."
            )
        return Response(serialize_job(find_job(request.user, job_id)))


class JobsActionView(APIView):
    @operation(
        "actOnJobs",
        "ActionResult",
        415,
        422,
        request=openapi.request_body(
            openapi.ref("JobsActionRequest"), {"action": "tag", "jobs": ["abcdefghij"], "tags": ["ci"]}
        ),
    )
    def post(self, request: Request) -> Response:
        """Cancel, archive, restore, tag, or untag jobs that you may change.

        The response lists the changed jobs, and why other jobs did not change. Only ended jobs can be archived.
        """
        body = validate_request(bulk_actions.JobsActionRequest, request.data)
        changed = bulk_actions.apply_action(body, request.user)
        return Response({"changed": changed, "unchanged": bulk_actions.list_unchanged(body, changed, request.user)})


class CancelJobView(APIView):
    @operation("cancelJob", "JobDetail", 404, 409, 415, 422)
    def post(self, request: Request, job_id: str) -> Response:
        """Cancel a job. All its processes end within 15 s."""
        job = find_job_to_change(request.user, job_id)
        reject_body(request)
        if not actions.cancel(job, request.user.get_username()):
            job.refresh_from_db()
            return refuse(409, "status", f"The job cannot be cancelled because it {describe_status(job.status)}.")
        return Response(serialize_job(find_job(request.user, job_id)))


class AdviceView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("adviseJob", "Advice", 404, 409)
    def get(self, request: Request, job_id: str) -> Response:
        """Return single changes that would have made an ended job faster on its hosts.

        Each change has its predicted gain and the part of the step with the largest gain. 409: the job has too few
        measurements.
        """
        return Response(compute_advice(find_job(request.user, job_id)))


class BetweenHostsView(APIView):
    @operation("betweenHosts", "HostTraffic", 404)
    def get(self, request: Request, job_id: str) -> Response:
        """Return the payload bytes between hosts and inside hosts, by axis.

        The axis dp has two levels with HSDP or expert parallelism. Measured values appear after the end of the run.
        """
        return Response(compute_host_traffic(find_job(request.user, job_id)))


class SmallerLayoutView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("offerSmaller", "SmallerLayout", 404, 409)
    def get(self, request: Request, job_id: str) -> Response:
        """Return the fastest layout on the connected hosts, for a job that does not fit them.

        409: no layout is offered.
        """
        return Response(find_smaller_layout(find_job(request.user, job_id)))

    @operation("runSmaller", "JobDetail", 404, 409, 415, 422)
    def post(self, request: Request, job_id: str) -> Response:
        """Queue a job again in the offered layout. It resumes from its newest checkpoint, resharded."""
        job = find_job_to_run(request.user, job_id)
        reject_body(request)
        if not actions.requeue_smaller(job, request.user.get_username()):
            return refuse(409, "status", f"The job cannot be retried because it {describe_status(job.status)}.")
        return Response(serialize_job(find_job(request.user, job_id)))


class RequeueJobView(APIView):
    @operation("requeueJob", "JobDetail", 404, 409, 415, 422)
    def post(self, request: Request, job_id: str) -> Response:
        """Start a new attempt of a job that failed, was lost, or was cancelled."""
        job = find_job_to_run(request.user, job_id)
        reject_body(request)
        if not actions.requeue(job, request.user.get_username()):
            return refuse(409, "status", f"The job cannot be retried because it {describe_status(job.status)}.")
        return Response(serialize_job(find_job(request.user, job_id)))


NEW_JOB: dict[Any, Any] = {
    201: openapi.describe_response("JobDetail"),
    200: openapi.describe_response("JobDetail", "The job of the first request with this key and body."),
    **describe_problems(403, 404, 409, 415, 422, 429),
}


class CopyJobView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("copyJob", NEW_JOB, request=openapi.PATCH, parameters=[KEY])
    def post(self, request: Request, job_id: str) -> Response:
        """Submit the spec of a job as a new job of yours, changed by a merge patch (RFC 7396).

        A null resets a field to its default. A preset replaces the whole model. 409: the job runs outside Meshboard.
        """
        return _submit_derived(request, job_id, lambda _job: request.data)


class ResumeJobView(APIView):
    pointers = {**{name: f"/change/{name}" for name in INSIDE}, "train.resume": "/checkpoint"}
    throttle_classes = [SubmitThrottle]

    @operation(
        "resumeJob",
        NEW_JOB,
        request=openapi.request_body(openapi.ref("ResumeRequest"), {"change": {"layout": {"dp": 4}}}),
        parameters=[KEY],
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Submit a new job that continues from a checkpoint of a job, optionally in another layout.

        To continue the job itself from its newest checkpoint, use /requeue. 409: the job has no checkpoint.
        """
        return _submit_derived(request, job_id, lambda job: _build_resume_change(job, request.data))


class CheckpointsView(APIView):
    @operation("listCheckpoints", openapi.describe_list("StoredCheckpoint"), 404)
    def get(self, request: Request, job_id: str) -> Response:
        """List the reported checkpoints of a job, newest first, at most 100 per attempt.

        Without a stored history, the list has only the newest checkpoint of an attempt.
        """
        return Response(list_checkpoints(find_job(request.user, job_id)))


class _NoCheckpointError(Exception):
    """No attempt of the job has reported a checkpoint."""


def _build_resume_change(job: Job, data: Any) -> dict[str, Any]:
    """Return the merge patch of a job that resumes from a checkpoint. Raises SpecError, _NoCheckpointError."""
    body = validate_request(derived_jobs.ResumeRequest, data)
    name = body.checkpoint or derived_jobs.get_newest_checkpoint(job)
    if name is None:
        raise _NoCheckpointError
    train = body.change.get("train")
    return {**body.change, "train": {**(train if isinstance(train, dict) else {}), "resume": name}}


def _submit_derived(request: Request, job_id: str, change_of: Callable[[Job], Any]) -> Response:
    """Submit a job derived from another one, once per idempotency key. `change_of` returns the merge patch."""
    user, key, request_body = get_user(request), get_idempotency_key(request), [request.path, request.data]
    try:
        if key is not None and (earlier := actions.find_idempotent_job(user, key, request_body)):
            return Response(serialize_job(earlier, None))
        job = find_job(user, job_id)
        made, queued = derived_jobs.copy_job(user, job, change_of(job), key=key, request_body=request_body)
    except _NoCheckpointError:
        return refuse(
            409, "checkpoint", "No attempt of this job saved a checkpoint. Retry the job to start from step 0."
        )
    except derived_jobs.ExternalJobError as error:
        return refuse(409, "engine", str(error))
    except actions.KeyReusedError:
        return refuse(
            422, KEY.name, f"`{KEY.name}` was used before with another body. Use a new idempotency key.", "header"
        )
    return Response(serialize_job(made, queued), status=201 if queued else 200)
