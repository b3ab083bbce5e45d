"""Send the final verdict of a run by webhook and mail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from email.message import EmailMessage
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Attempt, Delivery, MailWish, Status
from jobs.people.notifications import outbox
from jobs.people.notifications.delivery_worker import DeliveryWorker
from jobs.queue import actions, lifecycle
from jobs.runs.history.recording import recorder as recorder_module
from jobs.runs.history.recording.recorder import HistoryRecorder
from tests.jobs.history.conftest import end
from tests.jobs.history.sample_telemetry import Sender, generate_run
from tests.jobs.notifications.receivers import Receiver, build_response, make_webhook, run_receiver
from tests.planner.wrong_specs import GOOD
from tests.support.processes import wait_until


@pytest.fixture
def webhook(owner: User, attempt: Attempt, inbox: list[EmailMessage], settings: Any) -> Iterator[Receiver]:
    """Provide a webhook and a mail for each end of the owner's jobs."""
    settings.WEBHOOK_NETWORKS, settings.WEBHOOK_PORTS = [ip_network("127.0.0.1/32")], range(1, 65536)
    User.objects.filter(pk=owner.pk).update(email="owner@people.example")
    MailWish.objects.create(user=owner, states=["failed"])
    with run_receiver(build_response("204 No Content")) as made:
        make_webhook(owner, made, states=["failed", "queued"])
        yield made


@pytest.fixture
def postman() -> Iterator[DeliveryWorker]:
    made = DeliveryWorker()
    yield made
    made.close()


def send(postman: DeliveryWorker) -> None:
    def none_is_due() -> bool:
        postman.run_once()
        return not Delivery.objects.filter(due__lte=timezone.now() + timedelta(minutes=6), outcome="waiting").exists()

    wait_until(none_is_due, "every message was sent", 20)


def test_verdict_arrives_by_webhook_and_mail(
    attempt: Attempt,
    webhook: Receiver,
    inbox: list[EmailMessage],
    postman: DeliveryWorker,
    recorder: HistoryRecorder,
    live_redis: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "DIAGNOSIS_INTERVAL_S", 0.0)
    sender = Sender(live_redis, attempt.job_id)
    for some in generate_run(2, 12):
        sender.send(some)
    lifecycle.change_status(attempt.job_id, 1, Status.FAILED, "it failed")
    end(attempt, "failed")
    postman.run_once()
    assert set(Delivery.objects.values_list("outcome", flat=True)) == {"waiting"}
    assert not webhook.requests, "a message about an end waits for the verdict"
    wait_until(lambda: recorder.run_once() or Attempt.objects.get(pk=attempt.pk).recorded, "the history is whole", 20)
    assert not Delivery.objects.filter(due__gt=timezone.now()).exists(), "the verdict is stored"
    send(postman)
    attempt.refresh_from_db()
    body = json.loads(webhook.requests[0].body)
    assert body["job"]["status"] == "failed"
    assert body["verdict"] == {name: attempt.diagnosis[name] for name in ("state", "sentence", "reason", "next")}
    assert body["verdict"]["sentence"].startswith("Failed: ")
    (mail,) = inbox
    lines = mail.get_content().splitlines()
    assert lines[2] == attempt.diagnosis["sentence"]
    assert f"Job page: https://board.example/jobs/{attempt.job_id}/" in lines


def test_mail_lists_verdict_reason_and_next_step(
    attempt: Attempt, webhook: Receiver, inbox: list[EmailMessage], postman: DeliveryWorker
) -> None:
    final = {"over": True, "state": "failed", "sentence": "Failed: rank 1, ValueError: bad shape (train.py:12)."}
    final |= {"reason": "The rank ended with exit code 3.", "next": "Read the log of rank 1."}
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis=final)
    lifecycle.change_status(attempt.job_id, 1, Status.FAILED, "rank 1 ended with exit code 3: ValueError: bad shape")
    outbox.release_messages(attempt.job_id, 1)
    send(postman)
    (mail,) = inbox
    assert mail.get_content().splitlines()[:7] == [
        f"{attempt.job.name} ({attempt.job_id}) failed.",
        "",
        "Failed: rank 1, ValueError: bad shape (train.py:12).",
        "Why: The rank ended with exit code 3.",
        "Next: Read the log of rank 1.",
        "",
        f"Job page: https://board.example/jobs/{attempt.job_id}/",
    ]


def test_message_waits_a_bounded_time_for_the_verdict(
    attempt: Attempt,
    webhook: Receiver,
    inbox: list[EmailMessage],
    postman: DeliveryWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timedelta(seconds=10) <= outbox.MAX_WAIT <= timedelta(seconds=30)
    monkeypatch.setattr(outbox, "MAX_WAIT", timedelta(seconds=2))
    lifecycle.change_status(attempt.job_id, 1, Status.FAILED, "it failed")
    lifecycle.requeue(attempt.job_id, "again")
    postman.run_once()
    assert not webhook.requests
    send(postman)
    assert [json.loads(request.body)["job"]["status"] for request in webhook.requests] == ["failed", "queued"]
    assert [json.loads(request.body)["verdict"] for request in webhook.requests] == [None, None]
    (mail,) = inbox
    assert mail.get_content().splitlines()[1:3] == ["", "Reason: it failed"]


def test_retry_sends_equal_bytes(attempt: Attempt, webhook: Receiver, postman: DeliveryWorker) -> None:
    early = {"over": False, "state": "slow", "sentence": "Straggler: rank 1.", "reason": "It is slow.", "next": ""}
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis=early)
    lifecycle.change_status(attempt.job_id, 1, Status.FAILED, "it failed")
    waiting = Delivery.objects.get(webhook__isnull=False)
    outbox.add_verdicts([waiting])
    assert json.loads(waiting.body)["verdict"] is None
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis={**early, "over": True})
    outbox.add_verdicts([waiting])
    assert json.loads(Delivery.objects.get(pk=waiting.pk).body)["verdict"]["sentence"] == "Straggler: rank 1."
    sent = waiting.body
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis={**early, "over": True, "sentence": "Failed: rank 1."})
    waiting.tries = [{"at": timezone.now().isoformat(), "seconds": 1.0, "status": 500, "words": "answered 500"}]
    outbox.add_verdicts([waiting])
    assert waiting.body == sent


def test_end_of_an_attempt_does_not_send_the_message_of_the_next(attempt: Attempt, webhook: Receiver) -> None:
    lifecycle.change_status(attempt.job_id, 1, Status.FAILED, "it failed")
    lifecycle.requeue(attempt.job_id, "again")
    Attempt.objects.create(job=attempt.job, number=2)
    lifecycle.change_status(attempt.job_id, 2, Status.STARTING, "placed")
    lifecycle.change_status(attempt.job_id, 2, Status.FAILED, "it failed again")
    assert outbox.release_messages(attempt.job_id, 1) == 3, "webhook and mail of attempt 1, and its queued attempt"
    left = Delivery.objects.filter(due__gt=timezone.now())
    assert {json.loads(each.body)["job"]["attempt"] for each in left} == {2}


def test_job_that_never_started_waits_for_no_verdict(owner: User, webhook: Receiver, root: Path) -> None:
    job, _ = actions.submit(owner, GOOD)
    actions.cancel(job, "owner")
    assert not Delivery.objects.filter(due__gt=timezone.now()).exists()
