"""REST of a project's webhooks, and the log of what was sent to them."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.parameters import BadParameterError
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import Delivery, Webhook
from jobs.people.notifications import hooks
from jobs.planning.schemas import validate_request
from planner.facts.validation import Problem

MOST_ROWS = 100
BEFORE = OpenApiParameter(
    "before",
    {"type": "string", "pattern": "^d[a-z2-7]{19}$"},
    description="Return only deliveries older than the delivery with this id.",
)


class Webhooks(APIView):
    """A project's."""

    @extend_schema(operation_id="listWebhooks", responses={200: schema.list_of("WebhookDetail"), **refusals(403, 404)})
    def get(self, request: Request, project: str) -> Response:
        """Your webhooks of a project; all of them for who administers it."""
        return Response(hooks.told(hooks.visible_to(request.user, hooks.find_project(request.user, project))))

    @extend_schema(
        operation_id="makeWebhook",
        request=schema.WEBHOOK,
        responses={
            201: schema.of("NewWebhook", "The webhook with its secret, which is shown only once."),
            **refusals(403, 404, 415, 422),
        },
    )
    def post(self, request: Request, project: str) -> Response:
        """Have a URL told of what becomes of jobs: of your own, or as `everybody` of all in the project."""
        asked = validate_request(hooks.WebhookRequest, request.data)
        hook = hooks.make(user_of(request), hooks.find_project(request.user, project), asked)
        return _secret(hook, 201)


class WebhookView(APIView):
    """One of them."""

    @extend_schema(operation_id="getWebhook", responses={200: schema.of("WebhookDetail"), **refusals(403, 404)})
    def get(self, request: Request, project: str, key: str) -> Response:
        """A webhook, without its secret."""
        return Response(hooks.brief(hooks.find(request.user, project, key)))

    @extend_schema(
        operation_id="changeWebhook",
        request=schema.request_body(schema.ref("WebhookChange"), {"active": False}),
        responses={200: schema.of("WebhookDetail"), **refusals(403, 404, 415, 422)},
    )
    def patch(self, request: Request, project: str, key: str) -> Response:
        """Change what is given. A webhook that is not active is told of nothing, and what waits for it is kept."""
        hook = hooks.find(request.user, project, key)
        hooks.change(user_of(request), hook, validate_request(hooks.WebhookChange, request.data))
        return Response(hooks.brief(hook))

    @extend_schema(operation_id="deleteWebhook", responses={204: None, **refusals(403, 404, 415, 422)})
    def delete(self, request: Request, project: str, key: str) -> Response:
        """With its log, and what waits for it."""
        hook = hooks.find(request.user, project, key)
        refuse_body(request)
        hooks.delete(user_of(request), hook)
        return Response(status=204)


class Rotate(APIView):
    """Another secret."""

    @extend_schema(
        operation_id="rotateWebhook",
        request=None,
        responses={
            200: schema.of("NewWebhook", "The webhook with its secret, which is shown only once."),
            **refusals(403, 404, 415, 422),
        },
    )
    def post(self, request: Request, project: str, key: str) -> Response:
        """Make a new secret. For a day each message is signed with the one before as well."""
        hook = hooks.find(request.user, project, key)
        refuse_body(request)
        hooks.rotate(user_of(request), hook)
        return _secret(hook, 200)


class Ping(APIView):
    """Try it."""

    @extend_schema(
        operation_id="pingWebhook",
        request=None,
        responses={202: schema.of("WebhookDelivery"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, project: str, key: str) -> Response:
        """Send an event "ping", which tells of no job; the log says how it went."""
        hook = hooks.find(request.user, project, key)
        refuse_body(request)
        made = hooks.send_ping(user_of(request), hook)
        if made is None:
            return refuse(409, "key", "A ping is already being sent. Wait for the result of the ping.", "path")
        return Response(hooks.delivery_told(made), status=202)


class Deliveries(APIView):
    """What was sent."""

    @extend_schema(
        operation_id="listDeliveries",
        parameters=[BEFORE],
        responses={200: schema.list_of("WebhookDelivery"), **refusals(403, 404)},
    )
    def get(self, request: Request, project: str, key: str) -> Response:
        """The newest 100 messages to a webhook, each with how its tries went. Kept for 30 days."""
        hook = hooks.find(request.user, project, key)
        theirs = Delivery.objects.filter(webhook=hook)
        if (before := request.query_params.get("before")) is not None:
            last = theirs.filter(key=before).first() if is_storable(before) else None
            if last is None:
                raise BadParameterError(
                    [
                        Problem(
                            "before",
                            "`before` is not a delivery of this webhook. Use the id of a delivery in this list.",
                        )
                    ]
                )
            theirs = theirs.filter(pk__lt=last.pk)
        return Response([hooks.delivery_told(delivery) for delivery in theirs[:MOST_ROWS]])


class Redeliver(APIView):
    """Once more."""

    @extend_schema(
        operation_id="redeliver",
        request=None,
        responses={202: schema.of("WebhookDelivery"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, project: str, key: str, delivery: str) -> Response:
        """Send a message again, whatever became of it; it is tried for a day."""
        hook = hooks.find(request.user, project, key)
        theirs = Delivery.objects.filter(webhook=hook)
        found = theirs.filter(key=delivery).first() if is_storable(delivery) else None
        if found is None:
            raise NotFoundError("delivery")
        refuse_body(request)
        if not hooks.redeliver(user_of(request), hook, found):
            return refuse(409, "delivery", "The delivery is scheduled.", "path")
        found.refresh_from_db()
        return Response(hooks.delivery_told(found), status=202)


def _secret(hook: Webhook, status: int) -> Response:
    return Response(hooks.shown_once(hook), status=status, headers={"Cache-Control": "no-store"})
