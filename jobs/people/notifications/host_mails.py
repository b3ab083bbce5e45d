"""Emails and webhook events to staff about hosts that become sick, and that can start jobs again."""

from __future__ import annotations

import json
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils import timezone

from jobs.core.access import may_change_hosts
from jobs.models import Delivery, Webhook
from jobs.models.notifications import make_delivery_key
from jobs.people.notifications.outbox import HOST_EVENT, MAX_MAILS_PER_HOUR, get_silent_reason
from jobs.people.notifications.payloads import HostEventPayload, HostMailBody

MIN_MAIL_INTERVAL = timedelta(
    minutes=10
)  # between two mails about equal states of a host, which can change each second


def queue_host_mails(host: str, problem: str) -> None:
    """Queue an email and webhook events to all staff who can change hosts.

    Without a problem, the host can start jobs again.
    """
    hooks = _list_host_webhooks()
    if not settings.EMAIL_HOST and not hooks:
        return
    now = timezone.now()
    recent = Delivery.objects.filter(event=HOST_EVENT, created__gt=now - MIN_MAIL_INTERVAL)
    sent = [json.loads(body) for body in recent.values_list("body", flat=True)]
    if any(mail["host"] == host and bool(mail["problem"]) == bool(problem) for mail in sent):
        return
    body = HostMailBody(
        host=host,
        problem=problem,
        created=now.isoformat(),
        url=settings.BOARD_URL + reverse("host", args=[host]),
    )
    _queue_webhook_events(hooks, body)
    if not settings.EMAIL_HOST:
        return
    Delivery.objects.bulk_create(
        Delivery(key=make_delivery_key(), person=user, event=HOST_EVENT, body=json.dumps(body))
        for user in User.objects.filter(is_active=True, is_staff=True).exclude(email="")
        if may_change_hosts(user)
        and user.mails.filter(created__gt=now - timedelta(hours=1)).count() < MAX_MAILS_PER_HOUR
    )


def _list_host_webhooks() -> list[Webhook]:
    """Return the webhooks for all jobs of a project and all statuses, whose owners can change hosts."""
    hooks = Webhook.objects.filter(active=True, everybody=True, job="", states=[], owner__is_staff=True)
    return [
        hook for hook in hooks.select_related("owner") if may_change_hosts(hook.owner) and not get_silent_reason(hook)
    ]


def _queue_webhook_events(hooks: list[Webhook], body: HostMailBody) -> None:
    deliveries = []
    for hook in hooks:
        key = make_delivery_key()
        event = HostEventPayload(id=key, event=HOST_EVENT, job=None, verdict=None, **body)
        deliveries.append(Delivery(key=key, webhook=hook, event=HOST_EVENT, body=json.dumps(event)))
    Delivery.objects.bulk_create(deliveries)
