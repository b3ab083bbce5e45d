"""REST of what one is mailed of: by state, and of one job's end."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.access import find_job
from jobs.people.notifications import ends, wishes
from jobs.planning.schemas import validate_request

EXAMPLE = {"wishes": [{"project": None, "states": ["failed", "lost"]}]}


class EndMail(APIView):
    """Mail of one job's end."""

    @extend_schema(operation_id="getEndMail", responses={200: schema.of("EndEmail"), **refusals(404)})
    def get(self, request: Request, job_id: str) -> Response:
        """Whether you are mailed when it has ended."""
        return Response(ends.told(user_of(request), find_job(request.user, job_id)))

    @extend_schema(
        operation_id="askForEndMail",
        request=None,
        responses={200: schema.of("EndEmail"), **refusals(403, 404, 409, 415, 422)},
    )
    def put(self, request: Request, job_id: str) -> Response:
        """Be mailed once, when it has ended and is not tried again by itself. 409 where it has ended, this board sends
        no mail, or your account has no address."""
        user, job = user_of(request), find_job(request.user, job_id)
        refuse_body(request)
        try:
            ends.ask(user, job)
        except ends.NoMailError as error:
            return refuse(409, "mail", str(error))
        return Response(ends.told(user, job))

    @extend_schema(
        operation_id="forgetEndMail",
        responses={204: OpenApiResponse(description="The email is cancelled."), **refusals(403, 404)},
    )
    def delete(self, request: Request, job_id: str) -> Response:
        """Be not mailed of it after all."""
        ends.forget(user_of(request), find_job(request.user, job_id))
        return Response(status=204)


class Notifications(APIView):
    """Mail."""

    @extend_schema(operation_id="getNotifications", responses={200: schema.of("EmailSettings"), **refusals()})
    def get(self, request: Request) -> Response:
        """Of which states you are mailed: of your own jobs, and of those of each project that you see."""
        return Response(wishes.told(user_of(request)))

    @extend_schema(
        operation_id="setNotifications",
        request=schema.request_body({"allOf": [schema.ref("EmailSettingsRequest")]}, EXAMPLE),
        responses={200: schema.of("EmailSettings"), **refusals(403, 415, 422)},
    )
    def put(self, request: Request) -> Response:
        """Be mailed of these, and of nothing else."""
        user = user_of(request)
        wishes.wish(user, wishes.by_project(validate_request(wishes.EmailSettingsRequest, request.data)))
        return Response(wishes.told(user))
