"""REST that makes a job of another: a copy of it, or one that goes on from a checkpoint of it; and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.keys import KEY, key_of
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.plans import INSIDE
from jobs.api.shared import refusals, refuse, user_of
from jobs.core.access import find_job
from jobs.core.job_details import serialize_job
from jobs.models import Job
from jobs.planning.schemas import validate_request
from jobs.queue import actions, derived_jobs
from jobs.runs.history.queries.results import list_checkpoints

MADE: dict[Any, Any] = {
    201: schema.of("JobDetail"),
    200: schema.of("JobDetail", "The job of the first request with this key and body."),
    **refusals(403, 404, 409, 415, 422, 429),
}


class Copy(APIView):
    """The same again."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(operation_id="copyJob", request=schema.PATCH, parameters=[KEY], responses=MADE)
    def post(self, request: Request, job_id: str) -> Response:
        """A new job of yours with the job's spec, changed by the body: a merge patch (RFC 7396) in which null takes a
        field back to its default, and a preset the whole model. 409: it was launched elsewhere."""
        return _made(request, job_id, lambda _job: request.data)


class Resume(APIView):
    """On from a checkpoint."""

    places = {**{name: f"/change/{name}" for name in INSIDE}, "train.resume": "/checkpoint"}
    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="resumeJob",
        request=schema.request_body(schema.ref("ResumeRequest"), {"change": {"layout": {"dp": 4}}}),
        parameters=[KEY],
        responses=MADE,
    )
    def post(self, request: Request, job_id: str) -> Response:
        """A new job of yours that goes on from a checkpoint of the job, in another layout where the change says so. To
        run the job itself again, from its newest checkpoint, is /requeue. 409: it has no checkpoint."""
        return _made(request, job_id, lambda job: _resuming(job, request.data))


class Checkpoints(APIView):
    """What can be resumed."""

    @extend_schema(operation_id="listCheckpoints", responses={200: schema.list_of("StoredCheckpoint"), **refusals(404)})
    def get(self, request: Request, job_id: str) -> Response:
        """The checkpoints that the job's attempts told of, the newest first, at most 100 of each attempt; of one whose
        history is gone, the newest alone."""
        return Response(list_checkpoints(find_job(request.user, job_id)))


class _NoCheckpointError(Exception):
    """No attempt of the job told of one."""


def _resuming(job: Job, data: Any) -> dict[str, Any]:
    """The change of a job that goes on from a checkpoint. Raises SpecError, _NoCheckpointError."""
    asked = validate_request(derived_jobs.ResumeRequest, data)
    name = asked.checkpoint or derived_jobs.get_newest_checkpoint(job)
    if name is None:
        raise _NoCheckpointError
    train = asked.change.get("train")
    return {**asked.change, "train": {**(train if isinstance(train, dict) else {}), "resume": name}}


def _made(request: Request, job_id: str, change_of: Callable[[Job], Any]) -> Response:
    """What came makes one job under its key, whatever has become of the other meanwhile."""
    user, key, told = user_of(request), key_of(request), [request.path, request.data]
    try:
        if key is not None and (earlier := actions.find_idempotent_job(user, key, told)):
            return Response(serialize_job(earlier, None))
        job = find_job(user, job_id)
        made, queued = derived_jobs.copy_job(user, job, change_of(job), key=key, request_body=told)
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
