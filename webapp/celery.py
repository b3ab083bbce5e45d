"""The controller's Celery app: one periodic task that drains, schedules and reconciles."""

from __future__ import annotations

import os

from celery import Celery

from contracts.names import CONTROLLER_QUEUE, TASK_TICK

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")

from django.conf import settings

TICK_S = 1.0

app = Celery("meshboard", broker=settings.REDIS_URL)
app.conf.update(
    accept_content=["json"],
    task_serializer="json",
    task_ignore_result=True,
    task_default_queue=CONTROLLER_QUEUE,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 60, "socket_keepalive": True},
    timezone="UTC",
    # A tick that nobody ran within its period is stale: the next one does all of its work.
    beat_schedule={"tick": {"task": TASK_TICK, "schedule": TICK_S, "options": {"expires": TICK_S}}},
)
app.autodiscover_tasks(["jobs.queue"])
