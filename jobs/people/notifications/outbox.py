"""Queue webhook messages and emails in the transaction that changes the status of a job.

A message about the end of an attempt waits for the verdict, which the recorder stores some seconds after the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Count, Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from jobs.core.access import get_visible_jobs, may_administer, may_change_hosts
from jobs.models import TERMINAL, Attempt, Delivery, Job, MailWish, Outcome, StateChange, Webhook
from jobs.models.notifications import make_delivery_key
from jobs.people.notifications.email_settings import pop_end_email_users
from jobs.people.notifications.payloads import DeliveryTry, JobPayload, VerdictSummary, WebhookPayload
from planner.facts.kinds import get_kind_rules

MAX_MAILS_PER_HOUR = 200  # per user
PING_EVENT = "ping"
HOST_EVENT = "host.state"


def add_state_changes(changes: Sequence[StateChange]) -> None:
    """Store state changes and queue their notifications. Call it where the status is written."""
    StateChange.objects.bulk_create(changes)
    queue_notifications(changes)


def queue_notifications(changes: Sequence[StateChange]) -> None:
    """Queue a delivery of each change to each webhook and user that wants it."""
    active = Webhook.objects.filter(active=True)
    any_hook = active.exists()
    if not any_hook and not settings.EMAIL_HOST:
        return
    ids = {change.job_id for change in changes}
    concerned = Job.objects.filter(id__in=ids).order_by()
    projects = concerned.values("project")
    hooks = list(active.filter(project__in=projects).select_related("owner")) if any_hook else []
    of_these = Q(project="", user__in=concerned.values("owner")) | Q(project__in=projects)
    wishes = list(MailWish.objects.filter(of_these).select_related("user")) if settings.EMAIL_HOST else []
    ends = pop_end_email_users(changes) if settings.EMAIL_HOST else {}
    if not hooks and not wishes and not ends:
        return
    active_hooks = [hook for hook in hooks if not get_silent_reason(hook)]
    jobs = {job.id: job for job in concerned.select_related("owner").defer("estimate", "hardware", "chosen", "spec")}
    deliveries = []
    for change in changes:
        job = jobs[change.job_id]
        to_hooks = [hook for hook in active_hooks if _is_wanted(hook, job, change)]
        readers = _get_mail_recipients(wishes, ends, job, change)
        due = get_due(change, job, timezone.now()) if to_hooks or readers else None
        receivers: list[dict[str, Any]] = [{"webhook": hook} for hook in to_hooks]
        receivers += [{"person_id": person} for person in readers]
        deliveries += [Delivery(**_build_message(change, job), due=due, **receiver) for receiver in receivers]
    Delivery.objects.bulk_create(deliveries)


def queue_ping(hook: Webhook) -> Delivery:
    """Queue a test message."""
    key = make_delivery_key()
    delivery = Delivery(key=key, webhook=hook, event=PING_EVENT)
    delivery.body = _format_body(key, PING_EVENT, delivery.created, "", None)
    delivery.save()
    return delivery


def get_silent_reason(hook: Webhook) -> str:
    """Return why an active webhook sends nothing, empty if it sends.

    The rights of the owner are checked for each message, because they may change.
    """
    if not hook.owner.is_active:
        return f"the account of user {hook.owner.get_username()} is disabled"
    if hook.everybody and not may_administer(hook.owner, hook.project):
        return f"user {hook.owner.get_username()} is no longer an admin of project {hook.project}"
    return ""


def may_receive(delivery: Delivery) -> bool:
    """Return whether the recipient of a mail may still see its job or host. Owners also get mails on deleted jobs."""
    person = delivery.person
    assert person is not None, "an email has a recipient"
    if not person.is_active:
        return False
    if delivery.event == HOST_EVENT:
        return may_change_hosts(person)
    owner = json.loads(delivery.body)["job"]["owner"]
    return bool(owner == person.get_username() or get_visible_jobs(person).filter(id=delivery.job).exists())


def _is_wanted(hook: Webhook, job: Job, change: StateChange) -> bool:
    return (
        hook.project == job.project
        and hook.job in ("", job.id)
        and (hook.everybody or hook.owner_id == job.owner_id)
        and (not hook.states or change.status in hook.states)
    )


def _get_mail_recipients(
    wishes: Iterable[MailWish], ends: Mapping[str, list[User]], job: Job, change: StateChange
) -> list[int]:
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
        and Delivery.objects.filter(person=user, created__gt=hour).count() < MAX_MAILS_PER_HOUR
    ]


def _build_message(change: StateChange, job: Job) -> dict[str, str]:
    key = make_delivery_key()
    payload: JobPayload = {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "project": job.project,
        "owner": job.owner.get_username(),
        "attempt": change.attempt,
        "status": change.status,
        "url": settings.BOARD_URL + reverse("job-detail", args=[job.id]),
    }
    body = _format_body(key, STATE_EVENT, change.at, change.reason, payload)
    return {"key": key, "event": STATE_EVENT, "job": job.id, "body": body}


def _format_body(key: str, event: str, created: datetime, reason: str, job: JobPayload | None) -> str:
    payload: WebhookPayload = {
        "id": key,
        "event": event,
        "created": created.isoformat(),
        "reason": reason,
        "job": job,
        "verdict": None,
    }
    return json.dumps(payload)


MAX_STORED_TRIES = 30
NO_PERMISSION = "not sent: the recipient can no longer see the job or host"
DELIVERY_LIFETIME = timedelta(days=30)
MAX_RECEIVER_DELIVERIES = 10_000


def delete_old_deliveries() -> int:
    """Delete deliveries beyond their age or number. Return how many were deleted."""
    removed = Delivery.objects.filter(created__lt=timezone.now() - DELIVERY_LIFETIME).delete()[0]
    for receiver in ("webhook", "person"):
        counted = Delivery.objects.order_by().exclude(**{receiver: None}).values_list(receiver)
        for key, _ in counted.annotate(count=Count("id")).filter(count__gt=MAX_RECEIVER_DELIVERIES):
            theirs = Delivery.objects.filter(**{receiver: key})
            min_id = theirs.order_by("-id").values_list("id", flat=True)[MAX_RECEIVER_DELIVERIES - 1]
            removed += theirs.filter(id__lt=min_id).delete()[0]
    return removed


def abandon_deliveries(deliveries: Iterable[Delivery]) -> None:
    """End deliveries whose recipient lost access to the job."""
    last_try: DeliveryTry = {"at": timezone.now().isoformat(), "seconds": 0.0, "status": None, "words": NO_PERMISSION}
    over = list(deliveries)
    for delivery in over:
        delivery.due, delivery.outcome = None, Outcome.GIVEN_UP
        delivery.tries = [*delivery.tries, last_try][-MAX_STORED_TRIES:]
    Delivery.objects.bulk_update(over, ["due", "outcome", "tries"], batch_size=200)


MAX_WAIT = timedelta(seconds=20)  # for a verdict, after the end of an attempt
STATE_EVENT = "job.state"
Key = tuple[str, int]  # job, attempt


def get_due(change: StateChange, job: Job, now: datetime) -> datetime:
    """Return when the messages of a change are sent: now, or later if an attempt of the job waits for its verdict."""
    if not _has_verdict(job):
        return now
    attempt = Attempt.objects.filter(job=job, number=change.attempt)
    if change.status in TERMINAL and attempt.filter(recorded__isnull=True).exists():
        return now + MAX_WAIT
    # A receiver gets the messages of one job in order.
    return _get_waiting(job.id, now).order_by("-due").values_list("due", flat=True).first() or now


def release_messages(job_id: str, attempt: int) -> int:
    """Send the messages that waited for the verdict of this attempt. Return their number."""
    now = timezone.now()
    waiting = list(_get_waiting(job_id, now).only("body"))
    others = [each.pk for each in waiting if (end := _get_ended_attempt(json.loads(each.body))) and end[1] > attempt]
    return _get_waiting(job_id, now).exclude(pk__in=others).update(due=now)


def add_verdicts(deliveries: Sequence[Delivery]) -> None:
    """Store the verdict in each message about an end that was never sent. A later retry sends equal bytes."""
    unsent = [each for each in deliveries if not each.tries and each.event == STATE_EVENT]
    bodies: dict[int, WebhookPayload] = {each.pk: json.loads(each.body) for each in unsent}
    ends = {key: end for key, body in bodies.items() if (end := _get_ended_attempt(body)) and not body.get("verdict")}
    verdicts = _get_verdicts(ends.values())
    changed = [each for each in deliveries if ends.get(each.pk) in verdicts]
    for delivery in changed:
        delivery.body = json.dumps({**bodies[delivery.pk], "verdict": verdicts[ends[delivery.pk]]}, ensure_ascii=True)
    Delivery.objects.bulk_update(changed, ["body"], batch_size=200)


def _has_verdict(job: Job) -> bool:
    kind = get_kind_rules({"kind": job.kind})
    return not kind.shares_one_slot and not kind.measures_host


def _get_waiting(job_id: str, now: datetime) -> QuerySet[Delivery]:
    return Delivery.objects.filter(job=job_id, event=STATE_EVENT, tries=[], due__gt=now, due__lte=now + MAX_WAIT)


def _get_ended_attempt(body: WebhookPayload) -> Key | None:
    job = body["job"]
    return (job["id"], job["attempt"]) if job is not None and job["status"] in TERMINAL else None


def _get_verdicts(ends: Iterable[Key]) -> dict[Key, VerdictSummary]:
    wanted = Q(pk__in=[])
    for job, number in ends:
        wanted |= Q(job=job, number=number)
    rows = Attempt.objects.filter(wanted, diagnosis__over=True).values_list("job", "number", "diagnosis")
    return {
        (job, number): {
            "state": verdict.get("state", ""),
            "sentence": verdict["sentence"],
            "reason": verdict.get("reason", ""),
            "next": verdict.get("next", ""),
        }
        for job, number, verdict in rows
        if verdict and verdict.get("sentence")
    }
