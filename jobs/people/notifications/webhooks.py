"""Create and change webhooks. Each action is one transaction with its audit entry."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet
from django.db.models.signals import pre_save
from django.utils import timezone
from pydantic import Field

from jobs.core import access
from jobs.core.access import may_administer, may_submit_to
from jobs.core.audit import get_request_username, record
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import DEFAULT_PROJECT, Delivery, Outcome, Project, Status, Webhook
from jobs.models.validators import NameRule
from jobs.people.notifications.outbox import PING_EVENT, abandon_deliveries, get_silent_reason, queue_ping
from jobs.people.notifications.payloads import NewWebhook, WebhookDelivery, WebhookDetail
from jobs.people.notifications.webhook_transport import (
    RefusedAddressError,
    check_addresses,
    check_port,
    get_host_name,
    get_secret,
    is_in_networks,
    parse_address_literal,
)
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

MAX_PROJECT_WEBHOOKS = 50
MAX_OWNER_WEBHOOKS = 20
MAX_URL_CHARACTERS = 2000
JOB_ID = r"^[a-z2-7]{0,16}$"
WebhookName = Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL), NameRule]
WebhookUrl = Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARACTERS, pattern=NO_NUL), NameRule]
WebhookStatus = Annotated[Status, Field(strict=False)]


class WebhookRequest(StrictModel):
    """A new webhook."""

    name: WebhookName
    url: WebhookUrl = Field(description="Receiver of the messages: an https:// address on the public internet.")
    states: list[WebhookStatus] = Field(
        default=[],
        max_length=len(Status),
        description="Job statuses for which the webhook sends a message. Empty: all statuses.",
    )
    job: str = Field(
        default="",
        max_length=16,
        pattern=JOB_ID,
        description="Id of the only job that the webhook reports. Empty: all jobs.",
    )
    everybody: bool = Field(
        default=False,
        description="With true, the webhook reports all jobs of the project. Only project admins can set this.",
    )


class WebhookChange(StrictModel):
    """Changes of a webhook. Omitted fields keep their values."""

    name: WebhookName | None = None
    url: WebhookUrl | None = None
    states: list[WebhookStatus] | None = Field(default=None, max_length=len(Status))
    job: str | None = Field(default=None, max_length=16, pattern=JOB_ID)
    everybody: bool | None = None
    active: bool | None = Field(
        default=None,
        description="With false, the webhook sends nothing. With true, the webhook also sends waiting messages.",
    )


def check_webhook_project(user: Any, name: str) -> str:
    """Return the project name. Raises NotFoundError, or PermissionDenied if the user may not have webhooks in it."""
    if name != DEFAULT_PROJECT:  # may have no row
        access.find_project(user, name)
    if may_submit_to(user, name) or may_administer(user, name):
        return name
    raise PermissionDenied(f"You need the `submitter`, `operator`, or `admin` role in project {name} to use webhooks.")


def get_visible_webhooks(user: Any, project: str) -> QuerySet[Webhook]:
    """Return the own webhooks, or all webhooks of the project for its admins."""
    hooks = Webhook.objects.filter(project=project).select_related("owner")
    return hooks if may_administer(user, project) else hooks.filter(owner=user)


def find_webhook(user: Any, project: str, key: str) -> Webhook:
    """Return a visible webhook, or raise like `check_webhook_project`."""
    hooks = get_visible_webhooks(user, check_webhook_project(user, project))
    found = hooks.filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("webhook", "no such webhook, or it belongs to another user")
    return found


def create_webhook(user: User, project: str, webhook_request: WebhookRequest) -> Webhook:
    """Create a webhook. Raises SpecError."""
    if problems := [*_check_url(webhook_request.url), *_check_everybody(user, project, webhook_request.everybody)]:
        raise SpecError(problems)
    with transaction.atomic():
        # The locks serialize concurrent requests.
        list(Project.objects.select_for_update(no_key=True).filter(name=project))
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        theirs = Webhook.objects.filter(project=project)
        for count, maximum, subject in (
            (theirs.count(), MAX_PROJECT_WEBHOOKS, f"Project {project} has"),
            (Webhook.objects.filter(owner=user).count(), MAX_OWNER_WEBHOOKS, "You have"),
        ):
            if count >= maximum:
                problem = f"{subject} {count} webhooks, and the maximum is {maximum}. Delete a webhook first."
                raise SpecError([Problem("name", problem)])
        hook = Webhook.objects.create(project=project, owner=user, **webhook_request.model_dump(mode="json"))
        record(user.get_username(), "make", "webhook", hook.id, after=_get_webhook_fields(hook))
    return hook


def change_webhook(user: User, hook: Webhook, change: WebhookChange) -> None:
    """Change a webhook. Raises SpecError."""
    wanted = {name: value for name, value in change.model_dump(mode="json").items() if value is not None}
    problems = _check_url(wanted["url"]) if "url" in wanted else []
    # The rights of the owner count, not those of the user who changes the webhook.
    problems += _check_everybody(hook.owner, hook.project, wanted.get("everybody", False))
    if problems:
        raise SpecError(problems)
    with transaction.atomic():
        before = _get_webhook_fields(hook)
        for name, value in wanted.items():
            setattr(hook, name, value)
        hook.save(update_fields=list(wanted))
        record(user.get_username(), "change", "webhook", hook.id, before=before, after=_get_webhook_fields(hook))


def rotate_secret(user: User, hook: Webhook) -> str:
    """Replace the secret and return the new one. The old secret stays valid for a day."""
    with transaction.atomic():
        Webhook.objects.filter(pk=hook.pk).update(generation=F("generation") + 1, rotated=timezone.now())
        record(user.get_username(), "rotate", "webhook", hook.id)
    hook.refresh_from_db(fields=["generation", "rotated"])
    return get_secret(hook)


def delete_webhook(user: User, hook: Webhook) -> None:
    """Delete a webhook and its waiting deliveries."""
    with transaction.atomic():
        record(user.get_username(), "delete", "webhook", hook.id, before=_get_webhook_fields(hook))
        hook.delete()


def send_ping(user: User, hook: Webhook) -> Delivery | None:
    """Queue a test message. Return None if an earlier one waits."""
    with transaction.atomic():
        exists = list(Webhook.objects.select_for_update(no_key=True).filter(pk=hook.pk).values_list("pk"))
        waiting = Delivery.objects.filter(webhook=hook, event=PING_EVENT, due__isnull=False)
        if not exists or waiting.exists():
            return None
        delivery = queue_ping(hook)
        record(user.get_username(), "ping", "webhook", hook.id, after={"delivery": delivery.key})
    return delivery


def redeliver(user: User, hook: Webhook, delivery: Delivery) -> bool:
    """Send a finished delivery again. Return False if the delivery is not finished."""
    now = timezone.now()
    with transaction.atomic():
        over = Delivery.objects.filter(pk=delivery.pk, due=None)
        begun = over.update(due=now, since=now, outcome=Outcome.WAITING) == 1
        if begun:
            record(user.get_username(), "redeliver", "webhook", hook.id, after={"delivery": delivery.key})
    return begun


def serialize_webhooks(hooks: QuerySet[Webhook]) -> list[WebhookDetail]:
    waiting = Count("deliveries", filter=Q(deliveries__due__isnull=False))
    return [serialize_webhook(hook, hook.waiting) for hook in hooks.annotate(waiting=waiting)]


def serialize_webhook(hook: Webhook, waiting: int | None = None) -> WebhookDetail:
    """Return one webhook. `waiting` is counted by default."""
    on_its_way = hook.deliveries.filter(due__isnull=False).count() if waiting is None else waiting
    return {
        "id": hook.id,
        "project": hook.project,
        "owner": hook.owner.get_username(),
        "created": hook.created.isoformat(),
        "rotated": hook.rotated.isoformat() if hook.rotated else None,
        "waiting": on_its_way,
        "silent": get_silent_reason(hook),
        **_get_webhook_fields(hook),  # type: ignore[typeddict-item]
    }


def serialize_new_webhook(hook: Webhook) -> NewWebhook:
    return {**serialize_webhook(hook), "secret": get_secret(hook)}


def serialize_delivery(delivery: Delivery) -> WebhookDelivery:
    return {
        "id": delivery.key,
        "event": delivery.event,
        "job": delivery.job,
        "created": delivery.created.isoformat(),
        "outcome": delivery.outcome,
        "due": delivery.due.isoformat() if delivery.due else None,
        "tries": delivery.tries,
    }


def _get_webhook_fields(hook: Webhook) -> dict[str, Any]:
    return {name: getattr(hook, name) for name in ("name", "url", "states", "job", "everybody", "active")}


def _check_everybody(user: User, project: str, wanted: bool) -> list[Problem]:
    if not wanted or may_administer(user, project):
        return []
    return [Problem("everybody", f"`everybody` requires the `admin` role in project {project}. Omit `everybody`.")]


def _port(url: str) -> str:
    """As it is written: httpx reads digits of any script."""
    return urlsplit(url).netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[2]


def _check_url(url: str) -> list[Problem]:
    """Return the problems of a webhook URL. Each delivery also checks its address."""
    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            return [
                Problem("url", "`url` has no https:// scheme or no host name. Use a URL such as https://HOST/PATH.")
            ]
        if parsed.port is not None and not 1 <= parsed.port <= 65535:
            return [Problem("url", f"`url` has the invalid port {parsed.port}. Use a port from 1 to 65535.")]
        if not _port(url).isascii():
            return [Problem("url", "The port of `url` is not a number. Use digits 0 to 9.")]
        if "%" in parsed.host:
            return [Problem("url", "`url` names a network interface after %. Remove % and the interface name.")]
        if parsed.userinfo or parsed.fragment:
            return [Problem("url", "`url` contains a user, password, or fragment. Remove this part.")]
        check_port(parsed, settings.WEBHOOK_PORTS)
        found = check_addresses(
            get_host_name(parsed), parse_address_literal(get_host_name(parsed)), settings.WEBHOOK_NETWORKS
        )
    except (httpx.InvalidURL, ValueError) as error:
        return [Problem("url", f"`url` is invalid: {error}.")]
    except RefusedAddressError as error:
        return [Problem("url", str(error))]
    inside = bool(settings.WEBHOOK_NETWORKS) and all(is_in_networks(each, settings.WEBHOOK_NETWORKS) for each in found)
    if parsed.scheme == "http" and not inside:
        return [
            Problem(
                "url", "`url` uses unencrypted http://. Use https://, or add the network to MESHBOARD_WEBHOOK_NETWORKS."
            )
        ]
    return []


def connect_signals() -> None:
    pre_save.connect(_end_webhooks, sender=User, dispatch_uid="deactivate webhooks of a disabled account")


def _end_webhooks(instance: User, raw: bool, update_fields: Any, **_named: Any) -> None:
    if raw or instance._state.adding or instance.is_active:
        return
    if update_fields is not None and "is_active" not in update_fields:
        return
    if not User.objects.filter(pk=instance.pk, is_active=True).exists():
        return
    with transaction.atomic():
        theirs = Webhook.objects.filter(owner=instance)
        for hook in theirs.filter(active=True):
            record(
                get_request_username(instance.get_username()),
                "turn off",
                "webhook",
                hook.id,
                after="the account was closed",
            )
        theirs.update(active=False)
        abandon_deliveries(Delivery.objects.filter(webhook__owner=instance, due__isnull=False))
