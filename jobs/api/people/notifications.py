"""REST of what one is mailed of."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, user_of
from jobs.planning.queries import checked
from jobs.telling import wishes

EXAMPLE = {"wishes": [{"project": None, "states": ["failed", "lost"]}]}


class Notifications(APIView):
    """Mail."""

    @extend_schema(operation_id="getNotifications", responses={200: schema.of("MailsTold"), **refusals()})
    def get(self, request: Request) -> Response:
        """Of which states you are mailed: of your own jobs, and of those of each project that you see."""
        return Response(wishes.told(user_of(request)))

    @extend_schema(
        operation_id="setNotifications",
        request=schema.request_body({"allOf": [schema.ref("MailsWish")]}, EXAMPLE),
        responses={200: schema.of("MailsTold"), **refusals(403, 415, 422)},
    )
    def put(self, request: Request) -> Response:
        """Be mailed of these, and of nothing else."""
        user = user_of(request)
        wishes.wish(user, wishes.by_project(checked(wishes.MailsWish, request.data)))
        return Response(wishes.told(user))
