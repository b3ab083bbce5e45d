"""REST views of email about jobs, and of webhooks with their delivery log."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.errors import refuse, reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import BadParameterError
from jobs.api.views import APIView, get_user
from jobs.core.access import find_job
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import Delivery, Webhook
from jobs.people.notifications import email_settings, webhooks
from jobs.planning.schemas import validate_request
from planner.facts.validation import Problem

EMAIL_EXAMPLE = {"wishes": [{"project": None, "states": ["failed", "lost"]}]}


class EndMailView(APIView):
    @operation("getEndMail", "EndEmail", 404)
    def get(self, request: Request, job_id: str) -> Response:
        """Return whether you get an email when the job ends."""
        return Response(email_settings.get_end_email(get_user(request), find_job(request.user, job_id)))

    @operation("askForEndMail", "EndEmail", 404, 409, 415, 422)
    def put(self, request: Request, job_id: str) -> Response:
        """Request an email for the end of a job that is not retried automatically.

        409: the job has ended, this board sends no email, or your account has no address.
        """
        user, job = get_user(request), find_job(request.user, job_id)
        reject_body(request)
        email_settings.request_end_email(user, job)
        return Response(email_settings.get_end_email(user, job))

    @operation("forgetEndMail", {204: OpenApiResponse(description="The email is cancelled.")}, 404)
    def delete(self, request: Request, job_id: str) -> Response:
        """Cancel the email for the end of a job."""
        email_settings.cancel_end_email(get_user(request), find_job(request.user, job_id))
        return Response(status=204)


class NotificationsView(APIView):
    @operation("getNotifications", "EmailSettings")
    def get(self, request: Request) -> Response:
        """Return the states for which you get email, for your own jobs and per project."""
        return Response(email_settings.serialize_email_settings(get_user(request)))

    @operation(
        "setNotifications",
        "EmailSettings",
        415,
        422,
        request=openapi.request_body({"allOf": [openapi.ref("EmailSettingsRequest")]}, EMAIL_EXAMPLE),
    )
    def put(self, request: Request) -> Response:
        """Replace the states for which you get email."""
        user = get_user(request)
        email_settings.replace_email_settings(
            user,
            email_settings.parse_email_settings(validate_request(email_settings.EmailSettingsRequest, request.data)),
        )
        return Response(email_settings.serialize_email_settings(user))


MOST_ROWS = 100
BEFORE = OpenApiParameter(
    "before",
    {"type": "string", "pattern": "^d[a-z2-7]{19}$"},
    description="Return only deliveries older than the delivery with this id.",
)


class WebhooksView(APIView):
    @operation("listWebhooks", openapi.describe_list("WebhookDetail"), 404)
    def get(self, request: Request, project: str) -> Response:
        """List your webhooks of a project. Project admins see all webhooks."""
        return Response(
            webhooks.serialize_webhooks(
                webhooks.get_visible_webhooks(request.user, webhooks.check_webhook_project(request.user, project))
            )
        )

    @operation(
        "makeWebhook",
        {201: openapi.describe_response("NewWebhook", "The webhook with its secret, which is shown only once.")},
        404,
        415,
        422,
        request=openapi.WEBHOOK,
    )
    def post(self, request: Request, project: str) -> Response:
        """Create a webhook for state changes of your jobs, or of all jobs of the project with `everybody`."""
        body = validate_request(webhooks.WebhookRequest, request.data)
        hook = webhooks.create_webhook(get_user(request), webhooks.check_webhook_project(request.user, project), body)
        return _secret(hook, 201)


class WebhookView(APIView):
    @operation("getWebhook", "WebhookDetail", 404)
    def get(self, request: Request, project: str, key: str) -> Response:
        """Show a webhook without its secret."""
        return Response(webhooks.serialize_webhook(webhooks.find_webhook(request.user, project, key)))

    @operation(
        "changeWebhook",
        "WebhookDetail",
        404,
        415,
        422,
        request=openapi.request_body(openapi.ref("WebhookChange"), {"active": False}),
    )
    def patch(self, request: Request, project: str, key: str) -> Response:
        """Change a webhook. An inactive webhook gets no new messages, and waiting messages stay."""
        hook = webhooks.find_webhook(request.user, project, key)
        webhooks.change_webhook(get_user(request), hook, validate_request(webhooks.WebhookChange, request.data))
        return Response(webhooks.serialize_webhook(hook))

    @operation("deleteWebhook", {204: None}, 404, 415, 422)
    def delete(self, request: Request, project: str, key: str) -> Response:
        """Delete a webhook with its log and waiting messages."""
        hook = webhooks.find_webhook(request.user, project, key)
        reject_body(request)
        webhooks.delete_webhook(get_user(request), hook)
        return Response(status=204)


class RotateWebhookView(APIView):
    @operation(
        "rotateWebhook",
        openapi.describe_response("NewWebhook", "The webhook with its secret, which is shown only once."),
        404,
        415,
        422,
    )
    def post(self, request: Request, project: str, key: str) -> Response:
        """Create a new secret. For a day, messages also have a signature with the previous secret."""
        hook = webhooks.find_webhook(request.user, project, key)
        reject_body(request)
        webhooks.rotate_secret(get_user(request), hook)
        return _secret(hook, 200)


class PingWebhookView(APIView):
    @operation("pingWebhook", {202: openapi.describe_response("WebhookDelivery")}, 404, 409, 415, 422)
    def post(self, request: Request, project: str, key: str) -> Response:
        """Send an event "ping", which concerns no job. The log shows the result."""
        hook = webhooks.find_webhook(request.user, project, key)
        reject_body(request)
        made = webhooks.send_ping(get_user(request), hook)
        if made is None:
            return refuse(409, "key", "A ping is already being sent. Wait for the result of the ping.", "path")
        return Response(webhooks.serialize_delivery(made), status=202)


class DeliveriesView(APIView):
    @operation("listDeliveries", openapi.describe_list("WebhookDelivery"), 404, parameters=[BEFORE])
    def get(self, request: Request, project: str, key: str) -> Response:
        """List the newest 100 messages to a webhook with their delivery attempts. Messages stay for 30 days."""
        hook = webhooks.find_webhook(request.user, project, key)
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
        return Response([webhooks.serialize_delivery(delivery) for delivery in theirs[:MOST_ROWS]])


class RedeliveryView(APIView):
    @operation("redeliver", {202: openapi.describe_response("WebhookDelivery")}, 404, 409, 415, 422)
    def post(self, request: Request, project: str, key: str, delivery: str) -> Response:
        """Send a message again. Meshboard retries the delivery for a day."""
        hook = webhooks.find_webhook(request.user, project, key)
        theirs = Delivery.objects.filter(webhook=hook)
        found = theirs.filter(key=delivery).first() if is_storable(delivery) else None
        if found is None:
            raise NotFoundError("delivery")
        reject_body(request)
        if not webhooks.redeliver(get_user(request), hook, found):
            return refuse(409, "delivery", "The delivery is scheduled.", "path")
        found.refresh_from_db()
        return Response(webhooks.serialize_delivery(found), status=202)


def _secret(hook: Webhook, status: int) -> Response:
    return Response(webhooks.serialize_new_webhook(hook), status=status, headers={"Cache-Control": "no-store"})
