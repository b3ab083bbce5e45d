"""The controller's work, a second at a time."""

from __future__ import annotations

import logging
import threading

import redis
from celery import current_app, shared_task
from django.db import OperationalError, close_old_connections

from contracts.names import TASK_TICK
from jobs.connection import connect
from jobs.models import Outbox
from jobs.queue.events import drain
from jobs.queue.reconcile import reconcile
from jobs.queue.scheduler import schedule

log = logging.getLogger(__name__)

_busy = threading.Lock()


@shared_task(name=TASK_TICK)
def tick() -> None:
    """Drain events, schedule, reconcile, send. A tick that finds another at work leaves at once."""
    if not _busy.acquire(blocking=False):
        return
    try:
        close_old_connections()
        run()
    except (OperationalError, redis.RedisError) as error:
        log.warning("this tick was cut short: %s", error)
    finally:
        close_old_connections()
        _busy.release()


def run() -> None:
    """One pass; raises what the database or Redis raise, and the next pass goes on from there."""
    client = connect()
    try:
        drain(client)
        schedule()
        reconcile(client)
        deliver()
    finally:
        client.close()


def deliver() -> None:
    """Send what the outbox holds. Sent and then not deleted means sent twice, which hosts expect."""
    for row in Outbox.objects.order_by("id"):
        current_app.send_task(row.task, args=row.arguments, queue=row.queue)
        row.delete()
