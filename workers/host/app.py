"""The Celery app of a host worker, which `workers.host.join` starts.

Its tasks are short. Long work runs in a detached supervisor, which survives this worker and is found by the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from celery import Celery
from celery.signals import setup_logging, worker_ready, worker_shutdown

from contracts.codec import BadMessageError, validate_launch_order, validate_lend_order, validate_log_order
from contracts.names import (
    TASK_ACKNOWLEDGE,
    TASK_LAUNCH,
    TASK_LEND,
    TASK_READ_LOG,
    TASK_RESEND_REPORT,
    host_key_prefix,
    host_queue,
)
from workers.host.attempt_watcher import AttemptStarter
from workers.host.attempts import Pruner, get_attempt_dir
from workers.host.celery_transport import get_key_options
from workers.host.checkpoint_lending import CheckpointSenderPool
from workers.host.health_check import HealthCheck
from workers.host.isolation import choose_isolation
from workers.host.job_limits import set_up_limits
from workers.host.rank_files import read_log_part
from workers.host.reporter import Reporter
from workers.host.run_lock import keep_lock
from workers.host.settings import get_log_format, read_host_settings, set_up_json_logs

log = logging.getLogger(__name__)

Order = TypeVar("Order")

if get_log_format() == "json":
    set_up_json_logs()  # for lines before Celery sets up its logs
    setup_logging.connect(set_up_json_logs)

settings = read_host_settings()
keep_lock(settings)
settings, note = choose_isolation(settings)
limits = set_up_limits(settings)

app = Celery("meshboard-host", broker=settings.redis_url, amqp="workers.host.celery_transport:AMQP")
app.conf.update(
    accept_content=["json"],
    task_serializer="json",
    task_ignore_result=True,
    task_default_queue=host_queue(settings.name),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport="workers.host.celery_transport:Transport",
    broker_transport_options={
        "visibility_timeout": 60,
        "socket_keepalive": True,
        **get_key_options(host_key_prefix(settings.name)),
    },
)

health, pruner, sender = HealthCheck(settings), Pruner(settings), CheckpointSenderPool(settings)
reporter = Reporter(settings, note, health, pruner, limits)
starter = AttemptStarter(settings, reporter.exits, health)


@app.task(name=TASK_LAUNCH)
def launch(message: object) -> None:
    """Start the supervisor of an attempt once, unless the order has expired."""
    order = _check(validate_launch_order, message, "an order")
    if order is None:
        return
    late_s = reporter.get_time() - order["expires"]
    if late_s > 0:
        name = f"{order['job']}/{order['attempt']}"
        log.warning("refused the order of %s: the order expired %.1f s ago", name, late_s)
        return
    starter.start(order)
    reporter.wake()


@app.task(name=TASK_ACKNOWLEDGE)
def acknowledge(job: str, attempt: int) -> None:
    """Note that the controller has stored this attempt's exit report."""
    files = get_attempt_dir(settings.run_dir, job, attempt)
    reporter.exits.acknowledge(files)
    if files.exit_file.exists():
        files.acknowledged_marker.touch()


@app.task(name=TASK_RESEND_REPORT)
def report_again(job: str, attempt: int) -> None:
    """Report an acknowledged attempt again, because the controller restored an older database."""
    get_attempt_dir(settings.run_dir, job, attempt).acknowledged_marker.unlink(missing_ok=True)
    reporter.wake()


@app.task(name=TASK_READ_LOG)
def read_log(message: object) -> None:
    """Answer with a part of a log, unless the request has expired."""
    order = _check(validate_log_order, message, "a log request")
    if order is not None and reporter.get_time() <= order["expires"]:
        reporter.send_answer(order["question"], read_log_part(order, settings))


@app.task(name=TASK_LEND)
def lend(message: object) -> None:
    """Send a checkpoint of this host to an attempt on other hosts, unless the order has expired."""
    order = _check(validate_lend_order, message, "an order to send a checkpoint")
    if order is None:
        return
    if reporter.get_time() > order["expires"]:
        log.warning("refused to send a checkpoint to %s/%d: the order has expired", order["job"], order["attempt"])
        return
    sender.send(order)


def _check(decode: Callable[[object], Order], message: object, kind: str) -> Order | None:
    try:
        return decode(message)
    except BadMessageError as error:
        log.warning("refused %s: %s", kind, error)
        return None


@worker_ready.connect
def _start(**_: object) -> None:
    reporter.start()
    pruner.start()


@worker_shutdown.connect
def _stop(**_: object) -> None:
    pruner.stop()
    reporter.stop()
