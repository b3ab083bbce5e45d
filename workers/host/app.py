"""The Celery worker of a host, as `workers.host.join` starts it.

Its tasks are short. Long work lives in a detached supervisor, which outlives this worker and is adopted by the next.
"""

from __future__ import annotations

import logging

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
from workers.host.apart.isolation import isolated
from workers.host.attempts import attempt_dir
from workers.host.logs import answer
from workers.host.prune import Pruner
from workers.host.reporter import Reporter
from workers.host.settings import host_settings
from workers.host.start.lend import Lender
from workers.host.start.starting import Starter
from workers.host.transport import keys_below
from workers.host.worklog import log_format, write_json

log = logging.getLogger(__name__)

if log_format() == "json":
    write_json()  # also what is said before Celery asks for it
    setup_logging.connect(write_json)

settings, note = isolated(host_settings())

app = Celery("meshboard-host", broker=settings.redis_url, amqp="workers.host.transport:AMQP")
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
    broker_transport="workers.host.transport:Transport",
    broker_transport_options={
        "visibility_timeout": 60,
        "socket_keepalive": True,
        **keys_below(host_key_prefix(settings.name)),
    },
)

reporter, pruner, lender = Reporter(settings, note), Pruner(settings), Lender(settings)
starter = Starter(settings, reporter.ends)


@app.task(name=TASK_LAUNCH)
def launch(told: object) -> None:
    """Start the supervisor of an attempt, once however often the order is delivered, and not when it is stale."""
    try:
        order = validate_launch_order(told)
    except BadMessageError as error:
        log.warning("refused an order: %s", error)
        return
    name = f"{order['job']}/{order['attempt']}"
    late_s = reporter.now() - order["expires"]
    if late_s > 0:
        log.warning("refused the order of %s: the order expired %.1f s ago", name, late_s)
        return
    starter.start(order)
    reporter.wake()


@app.task(name=TASK_ACKNOWLEDGE)
def acknowledge(job: str, attempt: int) -> None:
    """The controller has stored this attempt's exit report; it need not be repeated."""
    target = attempt_dir(settings.run_dir, job, attempt)
    reporter.ends.acknowledge(target)
    if target.exit.exists():
        target.acknowledged.touch()


@app.task(name=TASK_RESEND_REPORT)
def tell_again(job: str, attempt: int) -> None:
    """The controller asks after an attempt that it was told the end of: its database is a copy from before."""
    attempt_dir(settings.run_dir, job, attempt).acknowledged.unlink(missing_ok=True)
    reporter.wake()


@app.task(name=TASK_READ_LOG)
def read_log(told: object) -> None:
    """Answer with a part of a log, unless nobody waits for it any more."""
    try:
        order = validate_log_order(told)
    except BadMessageError as error:
        log.warning("refused a log request: %s", error)
        return
    if reporter.now() > order["expires"]:
        return
    reporter.answer(order["question"], answer(order, settings))


@app.task(name=TASK_LEND)
def lend(told: object) -> None:
    """Have a checkpoint of this host sent to an attempt that runs on others, unless the order is stale."""
    try:
        order = validate_lend_order(told)
    except BadMessageError as error:
        log.warning("refused an order to send a checkpoint: %s", error)
        return
    if reporter.now() > order["expires"]:
        log.warning("refused to send a checkpoint to %s/%d: the order has expired", order["job"], order["attempt"])
        return
    lender.lend(order)


@worker_ready.connect
def _start(**_: object) -> None:
    reporter.start()
    pruner.start()


@worker_shutdown.connect
def _stop(**_: object) -> None:
    pruner.stop()
    reporter.stop()
