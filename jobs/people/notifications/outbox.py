"""Writes what is to be told, in the transaction that changes what it tells of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Q
from django.urls import reverse
from django.utils import timezone

from jobs.core.access import get_visible_jobs, may_administer
from jobs.models import TERMINAL, Delivery, Job, MailWish, StateChange, Webhook
from jobs.models.notifications import make_delivery_key
from jobs.people.notifications.ends import spend
from jobs.people.notifications.shapes import Told, ToldJob
from jobs.people.notifications.verdicts import STATE, get_due

MOST_MAILS_AN_HOUR = 200  # to a person
PING = "ping"


def write(changes: Sequence[StateChange]) -> None:
    """The changes, and a delivery to everybody who wants to be told of one. Call it where the status is written."""
    StateChange.objects.bulk_create(changes)
    tell(changes)


def tell(changes: Sequence[StateChange]) -> None:
    """A delivery to everybody who wants to be told of one of these."""
    active = Webhook.objects.filter(active=True)
    any_hook = active.exists()
    if not any_hook and not settings.EMAIL_HOST:  # as on most boards
        return
    ids = {change.job_id for change in changes}
    concerned = Job.objects.filter(id__in=ids).order_by()
    projects = concerned.values("project")
    hooks = list(active.filter(project__in=projects).select_related("owner")) if any_hook else []
    of_these = Q(project="", user__in=concerned.values("owner")) | Q(project__in=projects)
    wishes = list(MailWish.objects.filter(of_these).select_related("user")) if settings.EMAIL_HOST else []
    ends = spend(changes) if settings.EMAIL_HOST else {}
    if not hooks and not wishes and not ends:
        return
    told_hooks = [hook for hook in hooks if not why_silent(hook)]
    jobs = {job.id: job for job in concerned.select_related("owner").defer("estimate", "hardware", "chosen", "spec")}
    made = []
    for change in changes:
        job = jobs[change.job_id]
        to_hooks = [hook for hook in told_hooks if _wants(hook, job, change)]
        readers = _readers(wishes, ends, job, change)
        due = get_due(change, job, timezone.now()) if to_hooks or readers else None
        made += [Delivery(**_message(STATE, change, job), due=due, webhook=hook) for hook in to_hooks]
        made += [Delivery(**_message(STATE, change, job), due=due, person_id=person) for person in readers]
    Delivery.objects.bulk_create(made)


def ping(hook: Webhook) -> Delivery:
    """A message that tells of nothing, to see whether it arrives."""
    key = make_delivery_key()
    delivery = Delivery(key=key, webhook=hook, event=PING)
    delivery.body = _body(
        {"id": key, "event": PING, "created": _at(delivery.created), "reason": "", "job": None, "verdict": None}
    )
    delivery.save()
    return delivery


def why_silent(hook: Webhook) -> str:
    """Why it is told of nothing though it is active; "" where it is told. Its owner's rights are looked at each time:
    they may have gone since it was made."""
    if not hook.owner.is_active:
        return f"the account of user {hook.owner.get_username()} is disabled"
    if hook.everybody and not may_administer(hook.owner, hook.project):
        return f"user {hook.owner.get_username()} is no longer an admin of project {hook.project}"
    return ""


def may_read(delivery: Delivery) -> bool:
    """Whether the person whom a mail is for may hear of its job now; of their own also where it is gone."""
    person = delivery.person
    assert person is not None, "an email has a recipient"
    if not person.is_active:
        return False
    owner = json.loads(delivery.body)["job"]["owner"]
    return bool(owner == person.get_username() or get_visible_jobs(person).filter(id=delivery.job).exists())


def _wants(hook: Webhook, job: Job, change: StateChange) -> bool:
    return (
        hook.project == job.project
        and hook.job in ("", job.id)
        and (hook.everybody or hook.owner_id == job.owner_id)
        and (not hook.states or change.status in hook.states)
    )


def _readers(wishes: Iterable[MailWish], ends: Mapping[str, list[User]], job: Job, change: StateChange) -> list[int]:
    """Whom this change is mailed to, once each."""
    wanted = {
        wish.user_id: wish.user
        for wish in wishes
        if change.status in wish.states
        and wish.user.email
        and wish.user.is_active
        and (wish.user_id == job.owner_id if wish.project == "" else wish.project == job.project)
    }
    if change.status in TERMINAL:
        wanted |= {user.pk: user for user in ends.get(job.id, ()) if user.email}
    hour = timezone.now() - timedelta(hours=1)
    return [
        key
        for key, user in wanted.items()
        if (key == job.owner_id or get_visible_jobs(user).filter(id=job.id).exists())
        and Delivery.objects.filter(person=user, created__gt=hour).count() < MOST_MAILS_AN_HOUR
    ]


def _message(event: str, change: StateChange, job: Job) -> dict[str, str]:
    key = make_delivery_key()
    told: ToldJob = {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "project": job.project,
        "owner": job.owner.get_username(),
        "attempt": change.attempt,
        "status": change.status,
        "url": settings.BOARD_URL + reverse("job-detail", args=[job.id]),
    }
    created = _at(change.at)
    body = _body({"id": key, "event": event, "created": created, "reason": change.reason, "job": told, "verdict": None})
    return {"key": key, "event": event, "job": job.id, "body": body}


def _body(told: Told) -> str:
    return json.dumps(told, ensure_ascii=True)


def _at(when: datetime) -> str:
    return when.isoformat()
