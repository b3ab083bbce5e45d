"""The Celery worker of a host: `celery -A workers.host.app worker --queues host.NAME`.

Its tasks are short. Long work lives in a detached supervisor, which outlives this worker and is adopted by the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from celery import Celery
from celery.signals import worker_ready, worker_shutdown

from contracts.control import LaunchOrder
from contracts.names import TASK_ACKNOWLEDGE, TASK_LAUNCH, host_queue
from workers.host.attempts import attempt_dir, claim
from workers.host.reporter import Reporter
from workers.host.settings import host_settings

settings = host_settings()

app = Celery("meshboard-host", broker=settings.redis_url)
app.conf.update(
    accept_content=["json"],
    task_serializer="json",
    task_ignore_result=True,
    task_default_queue=host_queue(settings.name),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 60, "socket_keepalive": True},
)

reporter = Reporter(settings)


@app.task(name=TASK_LAUNCH)
def launch(order: dict[str, Any]) -> None:
    """Start the supervisor of an attempt, once however often the order is delivered."""
    typed: LaunchOrder = order  # type: ignore[assignment]  # JSON of our own controller
    claimed = claim(settings.run_dir, typed)
    if claimed is None:
        return
    # --fork detaches: the supervisor is nobody's child and in nobody's group.
    supervisor = [sys.executable, "-m", "workers.host.supervisor", str(claimed.path)]
    with (claimed.path / "supervisor.log").open("ab") as log:
        subprocess.run(
            ["setsid", "--fork", *supervisor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=os.getcwd(),
            check=True,
        )
    reporter.wake()


@app.task(name=TASK_ACKNOWLEDGE)
def acknowledge(job: str, attempt: int) -> None:
    """The controller has stored this attempt's exit report; it need not be repeated."""
    target = attempt_dir(settings.run_dir, job, attempt)
    if target.exit.exists():
        target.acknowledged.touch()


@worker_ready.connect
def _start(**_: object) -> None:
    reporter.start()


@worker_shutdown.connect
def _stop(**_: object) -> None:
    reporter.stop()
