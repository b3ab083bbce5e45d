"""The log of deliveries: what is over before it was sent, and what goes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.db.models import Count
from django.utils import timezone

from jobs.models import Delivery, Outcome
from jobs.people.notifications.shapes import Try

MOST_TRIES_KEPT = 30
LOST_THE_RIGHT = "not sent: the recipient can no longer see the job"
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


def give_up(deliveries: Iterable[Delivery]) -> None:
    """Whoever they are for lost the right to hear of it while they waited."""
    told: Try = {"at": timezone.now().isoformat(), "seconds": 0.0, "status": None, "words": LOST_THE_RIGHT}
    over = list(deliveries)
    for delivery in over:
        delivery.due, delivery.outcome = None, Outcome.GIVEN_UP
        delivery.tries = [*delivery.tries, told][-MOST_TRIES_KEPT:]
    Delivery.objects.bulk_update(over, ["due", "outcome", "tries"], batch_size=200)
