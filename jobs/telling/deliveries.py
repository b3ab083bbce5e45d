"""The log of deliveries: what is shown of it, and what goes."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Count
from django.utils import timezone

from jobs.models import Delivery

LAST = timedelta(days=30)
MOST_OF_RECEIVER = 10_000


def forget_old() -> int:
    """Drop what is over its bound; returns how many."""
    removed = Delivery.objects.filter(created__lt=timezone.now() - LAST).delete()[0]
    for receiver in ("webhook", "person"):
        counted = Delivery.objects.order_by().exclude(**{receiver: None}).values_list(receiver)
        for key, _ in counted.annotate(count=Count("id")).filter(count__gt=MOST_OF_RECEIVER):
            theirs = Delivery.objects.filter(**{receiver: key})
            oldest_kept = theirs.order_by("-id").values_list("id", flat=True)[MOST_OF_RECEIVER - 1]
            removed += theirs.filter(id__lt=oldest_kept).delete()[0]
    return removed
