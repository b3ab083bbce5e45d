"""With an account its webhooks end, wherever it was closed: in the admin, by a command.

Who opens it again turns them on again, where it still makes sense.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models.signals import pre_save

from jobs.core.audit import get_request_username, record
from jobs.models import Delivery, Webhook
from jobs.people.notifications.deliveries import give_up


def connect() -> None:
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
        give_up(Delivery.objects.filter(webhook__owner=instance, due__isnull=False))
