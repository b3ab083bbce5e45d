"""Webhooks as people make and change them; each action is one transaction, and is written down."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet
from django.utils import timezone
from pydantic import Field

from jobs.core import access
from jobs.core.access import may_administer, may_submit_to
from jobs.core.audit import record
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import DEFAULT_PROJECT, Delivery, Outcome, Project, Status, Webhook
from jobs.models.validators import NameRule
from jobs.people.notifications.addresses import RefusedAddressError, checked, is_inside, literal, name_of
from jobs.people.notifications.outbox import PING, ping, why_silent
from jobs.people.notifications.shapes import NewWebhook, WebhookDelivery, WebhookDetail
from jobs.people.notifications.signing import secret_of
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

MOST_IN_PROJECT = 50
MOST_OF_OWNER = 20
LONGEST_URL = 2000
JOB_ID = r"^[a-z2-7]{0,16}$"
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL), NameRule]
Url = Annotated[str, Field(min_length=1, max_length=LONGEST_URL, pattern=NO_NUL), NameRule]
State = Annotated[Status, Field(strict=False)]


class WebhookRequest(StrictModel):
    """What a webhook may be asked to be."""

    name: Name
    url: Url = Field(description="Receiver of the messages: an https:// address on the public internet.")
    states: list[State] = Field(
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
    """What of a webhook changes; what is not given stays."""

    name: Name | None = None
    url: Url | None = None
    states: list[State] | None = Field(default=None, max_length=len(Status))
    job: str | None = Field(default=None, max_length=16, pattern=JOB_ID)
    everybody: bool | None = None
    active: bool | None = Field(
        default=None,
        description="With false, the webhook sends nothing. With true, the webhook also sends waiting messages.",
    )


def find_project(user: Any, name: str) -> str:
    """A project's name; 404 where the user does not see it, 403 where they may have no webhooks there."""
    if name != DEFAULT_PROJECT:  # which everybody is in, also where it has no row
        access.find_project(user, name)
    if may_submit_to(user, name) or may_administer(user, name):
        return name
    raise PermissionDenied(f"You need the `submitter`, `operator`, or `admin` role in project {name} to use webhooks.")


def visible_to(user: Any, project: str) -> QuerySet[Webhook]:
    """One's own; all of a project for who administers it."""
    hooks = Webhook.objects.filter(project=project).select_related("owner")
    return hooks if may_administer(user, project) else hooks.filter(owner=user)


def find(user: Any, project: str, key: str) -> Webhook:
    """A webhook; 403 as `find_project` says it, and 404 alike for what is not there and what is not theirs."""
    hooks = visible_to(user, find_project(user, project))
    found = hooks.filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("webhook", "no such webhook, or it belongs to another user")
    return found


def make(user: User, project: str, asked: WebhookRequest) -> Webhook:
    """Raises SpecError where it may not be."""
    if problems := [*_url_problems(asked.url), *_everybody(user, project, asked.everybody)]:
        raise SpecError(problems)
    with transaction.atomic():
        # Of several at once each counts those of the one before.
        list(Project.objects.select_for_update(no_key=True).filter(name=project))
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        theirs = Webhook.objects.filter(project=project)
        for there, most, words in (
            (theirs.count(), MOST_IN_PROJECT, f"Project {project} has"),
            (Webhook.objects.filter(owner=user).count(), MOST_OF_OWNER, "You have"),
        ):
            if there >= most:
                raise SpecError(
                    [Problem("name", f"{words} {there} webhooks, and the maximum is {most}. Delete a webhook first.")]
                )
        hook = Webhook.objects.create(project=project, owner=user, **asked.model_dump(mode="json"))
        record(user.get_username(), "make", "webhook", hook.id, after=_kept(hook))
    return hook


def change(user: User, hook: Webhook, asked: WebhookChange) -> None:
    """Raises SpecError where it may not become so."""
    wanted = {name: value for name, value in asked.model_dump(mode="json").items() if value is not None}
    problems = _url_problems(wanted["url"]) if "url" in wanted else []
    # Of its owner, in whose right it is told: not of whoever changes it.
    problems += _everybody(hook.owner, hook.project, wanted.get("everybody", False))
    if problems:
        raise SpecError(problems)
    with transaction.atomic():
        before = _kept(hook)
        for name, value in wanted.items():
            setattr(hook, name, value)
        hook.save(update_fields=list(wanted))
        record(user.get_username(), "change", "webhook", hook.id, before=before, after=_kept(hook))


def rotate(user: User, hook: Webhook) -> str:
    """A new secret; the one before signs as well for a day."""
    with transaction.atomic():
        Webhook.objects.filter(pk=hook.pk).update(generation=F("generation") + 1, rotated=timezone.now())
        record(user.get_username(), "rotate", "webhook", hook.id)
    hook.refresh_from_db(fields=["generation", "rotated"])
    return secret_of(hook)


def delete(user: User, hook: Webhook) -> None:
    """With what was to be sent there."""
    with transaction.atomic():
        record(user.get_username(), "delete", "webhook", hook.id, before=_kept(hook))
        hook.delete()


def send_ping(user: User, hook: Webhook) -> Delivery | None:
    """A delivery that tells of nothing; None while an earlier one is on its way."""
    with transaction.atomic():
        there = list(Webhook.objects.select_for_update(no_key=True).filter(pk=hook.pk).values_list("pk"))
        waiting = Delivery.objects.filter(webhook=hook, event=PING, due__isnull=False)
        if not there or waiting.exists():
            return None
        delivery = ping(hook)
        record(user.get_username(), "ping", "webhook", hook.id, after={"delivery": delivery.key})
    return delivery


def redeliver(user: User, hook: Webhook, delivery: Delivery) -> bool:
    """Try again for a day; True when this call began it, False while it is on its way."""
    now = timezone.now()
    with transaction.atomic():
        over = Delivery.objects.filter(pk=delivery.pk, due=None)
        begun = over.update(due=now, since=now, outcome=Outcome.WAITING) == 1
        if begun:
            record(user.get_username(), "redeliver", "webhook", hook.id, after={"delivery": delivery.key})
    return begun


def told(hooks: QuerySet[Webhook]) -> list[WebhookDetail]:
    """As REST and the page show them."""
    waiting = Count("deliveries", filter=Q(deliveries__due__isnull=False))
    return [brief(hook, hook.waiting) for hook in hooks.annotate(waiting=waiting)]


def brief(hook: Webhook, waiting: int | None = None) -> WebhookDetail:
    """One webhook. `waiting` is counted where it is not given."""
    on_its_way = hook.deliveries.filter(due__isnull=False).count() if waiting is None else waiting
    return {
        "id": hook.id,
        "project": hook.project,
        "owner": hook.owner.get_username(),
        "created": hook.created.isoformat(),
        "rotated": hook.rotated.isoformat() if hook.rotated else None,
        "waiting": on_its_way,
        "silent": why_silent(hook),
        **_kept(hook),  # type: ignore[typeddict-item]
    }


def shown_once(hook: Webhook) -> NewWebhook:
    """With its secret."""
    return {**brief(hook), "secret": secret_of(hook)}


def delivery_told(delivery: Delivery) -> WebhookDelivery:
    """One line of the log."""
    return {
        "id": delivery.key,
        "event": delivery.event,
        "job": delivery.job,
        "created": delivery.created.isoformat(),
        "outcome": delivery.outcome,
        "due": delivery.due.isoformat() if delivery.due else None,
        "tries": delivery.tries,
    }


def _kept(hook: Webhook) -> dict[str, Any]:
    return {name: getattr(hook, name) for name in ("name", "url", "states", "job", "everybody", "active")}


def _everybody(user: User, project: str, wanted: bool) -> list[Problem]:
    if not wanted or may_administer(user, project):
        return []
    return [Problem("everybody", f"`everybody` requires the `admin` role in project {project}. Omit `everybody`.")]


def _port(url: str) -> str:
    """As it is written: httpx reads digits of any script."""
    return urlsplit(url).netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[2]


def _url_problems(url: str) -> list[Problem]:
    """Return the problems of a webhook URL. `jobs.people.notifications.post` checks its address at each delivery."""
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
        found = checked(name_of(parsed), literal(name_of(parsed)), settings.WEBHOOK_NETWORKS)
    except (httpx.InvalidURL, ValueError) as error:
        return [Problem("url", f"`url` is invalid: {error}.")]
    except RefusedAddressError as error:
        return [Problem("url", str(error))]
    inside = bool(settings.WEBHOOK_NETWORKS) and all(is_inside(each, settings.WEBHOOK_NETWORKS) for each in found)
    if parsed.scheme == "http" and not inside:
        return [
            Problem(
                "url", "`url` uses unencrypted http://. Use https://, or add the network to MESHBOARD_WEBHOOK_NETWORKS."
            )
        ]
    return []
