"""Who is mailed once, when one job has ended: asked for on its page, and gone with the job."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction

from jobs.core.audit import record
from jobs.models import TERMINAL, EndWish, Job, StateChange, describe_status
from jobs.people.notifications.shapes import EndEmail

MOST = 1000  # of a person


class NoMailError(Exception):
    """Nobody can be mailed of it; says why."""


def told(user: User, job: Job) -> EndEmail:
    return {
        "asked": EndWish.objects.filter(user=user, job=job).exists(),
        "email": user.email or None,
        "sends": bool(settings.EMAIL_HOST),
    }


def ask(user: User, job: Job) -> None:
    """Mail them when the job has ended.

    Raises:
        NoMailError: it has, this board sends no mail, the account has no address, or has asked of too many jobs.
    """
    if not settings.EMAIL_HOST:
        raise NoMailError("This board cannot send emails, because it has no mail server.")
    if not user.email:
        raise NoMailError("Your account has no mail address.")
    with transaction.atomic():
        status = Job.objects.select_for_update(no_key=True).values_list("status", flat=True).get(pk=job.pk)
        if status in TERMINAL:  # asked where it cannot end meanwhile, for then nobody would ever be mailed
            raise NoMailError(f"The job has already ended: it {describe_status(status)}.")
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # of several at once each counts those before
        if EndWish.objects.filter(user=user).count() >= MOST:
            raise NoMailError(
                f"You already requested emails for {MOST:,} jobs, the maximum. Cancel one of these requests first."
            )
        _, new = EndWish.objects.get_or_create(user=user, job=job)
        if new:
            record(user.get_username(), "request email at end", "job", job.id)


def forget(user: User, job: Job) -> bool:
    """True when this call did it."""
    with transaction.atomic():
        gone, _ = EndWish.objects.filter(user=user, job=job).delete()
        if gone:
            record(user.get_username(), "cancel email at end", "job", job.id)
    return bool(gone)


def spend(changes: Sequence[StateChange]) -> dict[str, list[User]]:
    """Whom to mail, by the job that has ended with one of these; they are not mailed of it again. One that is tried
    again by itself has not."""
    ids = {change.job_id for change in changes if change.status in TERMINAL}
    asked = EndWish.objects.filter(job__in=ids)
    if not ids or not asked.exists():
        return {}
    jobs = Job.objects.only("id", "attempt", "status", "stop", "spec").filter(id__in=asked.values("job"))
    ended = [job.id for job in jobs if job.get_retry_reason() is None]
    found: dict[str, list[User]] = {}
    for wish in asked.filter(job__in=ended).select_related("user"):
        found.setdefault(wish.job_id, []).append(wish.user)
    asked.filter(job__in=ended).delete()
    return found
