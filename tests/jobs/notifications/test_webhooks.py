"""Deliveries of webhooks to real receivers, some of which fail or are hostile."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Delivery, Lease, Outcome, StateChange, Status, Webhook
from jobs.operations.controller import Controller
from jobs.people.notifications import webhook_transport, webhooks
from jobs.people.notifications.delivery_worker import BATCH_SIZE, RETRY_DURATION, DeliveryWorker, compute_next_try
from jobs.people.notifications.webhook_transport import get_secret, get_valid_secrets, sign_body
from jobs.queue import actions, lifecycle, work_lease
from tests.jobs.notifications.receivers import ENDLESS, Receiver, build_response, make_webhook, run_receiver
from tests.planner.wrong_specs import GOOD
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.usefixtures("local_receivers")
OK = build_response("204 No Content")


@pytest.fixture
def worker() -> Iterator[DeliveryWorker]:
    worker = DeliveryWorker()
    yield worker
    worker.close()


def run_until_tried(worker: DeliveryWorker, *deliveries: Delivery, timeout_s: float = 20.0) -> None:
    """Run the worker until each delivery was tried once, and check that no run waits for a receiver."""
    keys = [delivery.pk for delivery in deliveries]

    def are_tried() -> bool:
        began = time.monotonic()
        worker.run_once()
        assert time.monotonic() - began < 5.0, "the controller's thread does not wait"
        return all(Delivery.objects.get(pk=key).tries for key in keys)

    wait_until(are_tried, "every delivery is tried", timeout_s)


def is_valid_signature(secret: str, header: str, body: bytes) -> bool:
    """Return whether a signature is valid, checked by the steps that Stripe's documentation gives."""
    parts = [part.partition("=")[::2] for part in header.split(",")]
    timestamp = next(value for name, value in parts if name == "t")
    expected = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    is_fresh = abs(time.time() - int(timestamp)) < 300
    return is_fresh and any(hmac.compare_digest(expected, value) for name, value in parts if name == "v1")


def test_sends_each_change_in_order_with_a_valid_signature(owner: User, worker: DeliveryWorker) -> None:
    with run_receiver(OK) as receiver:
        hook = make_webhook(owner, receiver)
        job, _ = actions.submit(owner, GOOD)
        actions.cancel(job, "owner")
        run_until_tried(worker, *Delivery.objects.all())
        wait_until(lambda: len(receiver.requests) == 3, "all three requests arrive")
        messages = [json.loads(request.body) for request in receiver.requests]
        assert [each["job"]["status"] for each in messages] == ["queued", "cancelling", "cancelled"]
        assert messages[0]["job"] | {"name": "", "kind": ""} == {
            "id": job.id,
            "name": "",
            "kind": "",
            "project": "default",
            "owner": "owner",
            "attempt": 1,
            "status": "queued",
            "url": f"https://board.example/jobs/{job.id}/",
        }
        assert messages[2]["reason"] == "cancelled by owner"
        request = receiver.requests[0]
        assert (request.target, request.headers["Host"]) == ("/hook?a=1", f"127.0.0.1:{receiver.port}")
        assert request.headers["Meshboard-Delivery"] == messages[0]["id"]
        assert is_valid_signature(get_secret(hook), request.headers["Meshboard-Signature"], request.body)
        assert not is_valid_signature(get_secret(hook), request.headers["Meshboard-Signature"], request.body + b" ")
        assert not is_valid_signature("mbw_another", request.headers["Meshboard-Signature"], request.body)
    assert set(Delivery.objects.values_list("outcome", "due")) == {(Outcome.DELIVERED, None)}


def test_old_secret_is_valid_for_a_day_after_rotation(owner: User, api: Callable[[User], APIClient]) -> None:
    response = api(owner).post(
        "/api/v1/projects/default/webhooks", {"name": "ci", "url": "https://ci.example"}, format="json"
    )
    path, first = f"/api/v1/projects/default/webhooks/{response.json()['id']}", response.json()["secret"]
    assert response["Cache-Control"] == "no-store"
    second = api(owner).post(f"{path}/rotate").json()["secret"]
    assert first not in api(owner).get(path).content.decode()
    hook, now, body = Webhook.objects.get(), int(time.time()), b"{}"
    both = sign_body(get_valid_secrets(hook), now, body)
    assert is_valid_signature(first, both, body)
    assert is_valid_signature(second, both, body)
    hook.rotated = timezone.now() - timedelta(days=1, seconds=1)
    later = sign_body(get_valid_secrets(hook), now, body)
    assert is_valid_signature(second, later, body)
    assert not is_valid_signature(first, later, body)
    assert [entry.what for entry in AuditEntry.objects.filter(kind="webhook")] == ["rotate", "make"]
    assert first not in json.dumps(list(AuditEntry.objects.values("before", "after")))


def test_bad_receivers_delay_no_others_and_reach_no_private_address(
    owner: User, worker: DeliveryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_transport, "POST_TIMEOUT_S", 4.0)
    with contextlib.ExitStack() as stack:
        trap = stack.enter_context(run_receiver(OK))
        silent = stack.enter_context(run_receiver(None))
        broken = stack.enter_context(run_receiver(build_response("500 No")))
        endless = stack.enter_context(run_receiver(ENDLESS, endless=True))
        endless_header = stack.enter_context(run_receiver(b"HTTP/1.1 200 OK\r\nX: ", endless=True))
        moved = stack.enter_context(
            run_receiver(build_response("302 Found", f"Location: http://127.0.0.1:{trap.port}/"))
        )
        good = stack.enter_context(run_receiver(OK))
        unused = socket.create_server(("127.0.0.1", 0))
        closed_port = unused.getsockname()[1]
        unused.close()
        urls = {
            "silent": silent,
            "broken": broken,
            "endless": endless,
            "babbling": endless_header,
            "moved": moved,
            "nobody": f"http://127.0.0.1:{closed_port}/",
            "rebound": f"http://127.0.0.2:{trap.port}/",
            "good": good,
        }
        deliveries = {name: webhooks.send_ping(owner, make_webhook(owner, url)) for name, url in urls.items()}
        sent = [delivery for delivery in deliveries.values() if delivery is not None]
        assert len(sent) == len(urls)
        good_one = deliveries["good"]
        assert good_one is not None
        began = time.monotonic()
        run_until_tried(worker, good_one)
        assert time.monotonic() - began < 4.0, "the good receiver does not wait for the silent one"
        run_until_tried(worker, *sent)
        rows = {name: Delivery.objects.get(pk=each.pk) for name, each in deliveries.items() if each is not None}
        messages = {name: delivery.tries[0]["words"] for name, delivery in rows.items()}
        assert messages["silent"] == "the receiver did not answer within 4 s"
        assert messages["broken"] == "answered 500"
        assert messages["endless"] == "answered 200"
        assert "RemoteProtocolError" in messages["babbling"] or "no answer" in messages["babbling"]
        assert messages["moved"] == "answered 302, redirects are not followed"
        assert "ConnectError" in messages["nobody"]
        assert "resolves to a private address" in messages["rebound"]
        assert trap.connections == 0
        assert endless.sent_bytes < 2**24, "reads only a small part of a response of 10 GB"
        assert {name for name, each in rows.items() if each.outcome == Outcome.DELIVERED} == {"good", "endless"}
        assert all(each.due > each.created + timedelta(seconds=5) for each in rows.values() if each.due is not None)


def test_connects_to_the_address_that_was_checked(
    owner: User, worker: DeliveryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lookup of the name returns another address, to which nothing must be sent."""
    real, names = socket.getaddrinfo, []

    def resolve_differently(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host != "hooks.example":
            return real(host, port, *rest, **options)
        names.append(host)
        return real("127.0.0.1" if len(names) == 1 else "127.0.0.2", port, *rest, **options)

    with run_receiver(OK) as receiver:
        monkeypatch.setattr(socket, "getaddrinfo", resolve_differently)
        sent = webhooks.send_ping(owner, make_webhook(owner, f"http://hooks.example:{receiver.port}/x"))
        assert sent is not None
        run_until_tried(worker, sent)
        assert Delivery.objects.get().tries[0]["words"] == "answered 204"
        assert names == ["hooks.example"]
        assert receiver.requests[0].headers["Host"] == f"hooks.example:{receiver.port}"


@pytest.mark.parametrize(
    ("host", "certified", "status"),
    [
        ("hooks.example", "hooks.example", 204),
        ("hooks.example", "other.example", None),
        ("straße.example", "xn--strae-oqa.example", 204),
        ("straße.example", "strasse.example", None),
    ],
)
def test_requires_a_certificate_for_the_name(
    host: str,
    certified: str,
    status: int | None,
    owner: User,
    worker: DeliveryWorker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """IDNA 2008 keeps the letter ß. IDNA 2003 replaced it by ss, which can be the domain of another owner."""
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.pem")]
    name = ["-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{certified}"]
    kind = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    subprocess.run([*kind, *name, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    real, names = socket.getaddrinfo, []

    def resolve_to_loopback(name: Any, *rest: Any, **options: Any) -> Any:
        names.append(name)
        return real("127.0.0.1", *rest, **options)

    with run_receiver(OK, tls=context) as receiver:
        monkeypatch.setattr(socket, "getaddrinfo", resolve_to_loopback)
        sent = webhooks.send_ping(owner, make_webhook(owner, f"https://{host}:{receiver.port}/"))
        assert sent is not None
        run_until_tried(worker, sent)
        assert names[0] == httpx.URL(f"https://{host}/").raw_host.decode(), "resolves the name in the Host header"
        (attempt,) = Delivery.objects.get().tries
        assert attempt["status"] == status, attempt
        assert bool(receiver.requests) == (status is not None)
        assert status is not None or "CERTIFICATE_VERIFY_FAILED" in attempt["words"]


def test_stores_a_delivery_in_the_transaction_of_the_change(owner: User) -> None:
    make_webhook(owner, "https://hooks.example/")
    job, _ = actions.submit(owner, GOOD)
    assert Delivery.objects.count() == 1
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        assert lifecycle.change_status(job.id, 1, Status.CANCELLING, "no")
        raise ZeroDivisionError
    assert Delivery.objects.count() == StateChange.objects.count() == 1
    assert not lifecycle.change_status(job.id, 1, Status.SUCCEEDED, "it did not run")
    assert Delivery.objects.count() == 1


def test_one_module_writes_state_changes() -> None:
    modules = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jobs").rglob("*.py")
        if "StateChange.objects.create" in path.read_text() or "StateChange.objects.bulk_create" in path.read_text()
    ]
    assert modules == ["jobs/people/notifications/outbox.py"], "a change written elsewhere would send no notification"


def test_webhooks_receive_only_selected_changes(owner: User, stranger: User, staff: User) -> None:
    own = make_webhook(owner, "https://a.example/", states=["queued"])
    of_all_users = make_webhook(staff, "https://b.example/", everybody=True)
    without_rights = make_webhook(stranger, "https://c.example/", everybody=True)
    paused = make_webhook(owner, "https://d.example/", active=False)
    mine, _ = actions.submit(owner, GOOD)
    one_job = make_webhook(owner, "https://e.example/", job=mine.id)
    other, _ = actions.submit(stranger, GOOD)
    actions.cancel(mine, "owner")

    def list_statuses(hook: Webhook) -> list[tuple[str, str]]:
        rows = Delivery.objects.filter(webhook=hook).order_by("id")
        return [(row.job, json.loads(row.body)["job"]["status"]) for row in rows]

    assert list_statuses(own) == [(mine.id, "queued")]
    assert list_statuses(of_all_users) == [
        (mine.id, "queued"),
        (other.id, "queued"),
        (mine.id, "cancelling"),
        (mine.id, "cancelled"),
    ]
    assert list_statuses(without_rights) == list_statuses(paused) == []
    assert list_statuses(one_job) == [(mine.id, "cancelling"), (mine.id, "cancelled")]


def test_gives_up_a_delivery_after_its_owner_lost_access(owner: User, staff: User, worker: DeliveryWorker) -> None:
    with run_receiver(OK) as receiver:
        make_webhook(staff, receiver, everybody=True)
        actions.submit(owner, GOOD)
        User.objects.filter(pk=staff.pk).update(is_staff=False)
        run_until_tried(worker, Delivery.objects.get())
        assert receiver.requests == []
    delivery = Delivery.objects.get()
    assert (delivery.outcome, delivery.due) == (Outcome.GIVEN_UP, None)
    assert delivery.tries[0]["words"] == "not sent: the recipient can no longer see the job or host"


def test_retries_for_a_day_with_growing_pauses() -> None:
    began = now = timezone.now()
    pauses = []
    while (due := compute_next_try(len(pauses) + 1, began, now)) is not None:
        pauses.append((due - now).total_seconds())
        now = due
    assert 12 <= len(pauses) <= 18
    assert 7.5 <= pauses[0] <= 12.5
    min_ratio = 0.75 / 1.25  # The smallest ratio of two pauses at the maximum, because of jitter.
    assert all(later > earlier * (min_ratio - 0.001) for earlier, later in itertools.pairwise(pauses))
    assert max(pauses) <= 4 * 3600 * 1.25
    assert timedelta(hours=16) < now - began <= RETRY_DURATION
    assert len({compute_next_try(1, began, began) for _ in range(20)}) > 10, "pauses have jitter"


def test_redelivers_on_request_after_giving_up(
    owner: User, worker: DeliveryWorker, api: Callable[[User], APIClient]
) -> None:
    with run_receiver(build_response("503 Away")) as receiver:
        sent = webhooks.send_ping(owner, make_webhook(owner, receiver))
        assert sent is not None
        Delivery.objects.update(since=timezone.now() - RETRY_DURATION)
        run_until_tried(worker, sent)
    given_up = Delivery.objects.get()
    assert (given_up.outcome, given_up.due) == (Outcome.GIVEN_UP, None)
    with run_receiver(OK) as receiver:
        hook = Webhook.objects.get()
        Webhook.objects.update(url=f"http://127.0.0.1:{receiver.port}/")
        path = f"/api/v1/projects/default/webhooks/{hook.id}/deliveries/{given_up.key}/redeliver"
        assert api(owner).post(path).status_code == 202
        assert api(owner).post(path).status_code == 409
        wait_until(lambda: worker.run_once() or receiver.requests, "the delivery is sent again")
        wait_until(
            lambda: worker.run_once() or Delivery.objects.get().outcome == Outcome.DELIVERED, "the outcome is stored"
        )
        assert receiver.requests[0].headers["Meshboard-Delivery"] == given_up.key
    assert [each["status"] for each in Delivery.objects.get().tries] == [503, 204]


def test_next_worker_resends_with_the_same_key(owner: User, worker: DeliveryWorker) -> None:
    with run_receiver(OK) as receiver:
        sent = webhooks.send_ping(owner, make_webhook(owner, receiver))
        assert sent is not None
        dead = DeliveryWorker()
        dead.run_once()
        wait_until(lambda: receiver.requests, "the first worker sends the delivery")
        dead.close()
        worker.run_once()
        assert not Delivery.objects.filter(due__lte=timezone.now()).exists(), (
            "the first worker has claimed the delivery"
        )
        Delivery.objects.update(due=timezone.now())  # The claim ends after five minutes.
        run_until_tried(worker, sent)
        assert len({request.headers["Meshboard-Delivery"] for request in receiver.requests}) == 1
        assert len(receiver.requests) == 2


def test_close_aborts_open_requests(owner: User) -> None:
    with run_receiver(None) as receiver:
        webhooks.send_ping(owner, make_webhook(owner, receiver))
        ending = DeliveryWorker()
        ending.run_once()
        wait_until(lambda: receiver.requests, "the request is sent and waits for its response")
        ending.close()
        loop = ending._loop
        assert loop is not None
        wait_until(loop.is_closed, "the thread ends")
        assert len(ending._results) == 1, "the batch ends"


def test_tries_a_failing_receiver_once_per_run(owner: User, worker: DeliveryWorker) -> None:
    with run_receiver(build_response("500 No")) as receiver:
        hook = make_webhook(owner, receiver)
        body = json.dumps({"id": "", "event": "ping", "created": "", "reason": "", "job": None})
        Delivery.objects.bulk_create(Delivery(webhook=hook, event="ping", body=body) for _ in range(BATCH_SIZE + 5))
        first = Delivery.objects.order_by("id")[0]
        run_until_tried(worker, first)
        assert Delivery.objects.filter(tries=[]).count() >= BATCH_SIZE


@pytest.fixture
def sent(transactional_db: None, owner: User, live_redis: redis.Redis) -> Iterator[tuple[Controller, Receiver]]:
    """Yield a controller that has sent a delivery and not stored its outcome, and the receiver."""
    with run_receiver(build_response("204 No Content")) as receiver:
        make_webhook(owner, receiver)
        actions.submit(owner, GOOD)
        first = Controller()
        first.run_once()
        wait_until(lambda: len(first._postman._results) == 2, "the outcome and the end of the batch are queued")
        assert (len(receiver.requests), Delivery.objects.get().outcome) == (1, Outcome.WAITING)
        yield first, receiver


def test_controller_stores_outcomes_after_losing_the_lease(
    sent: tuple[Controller, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sent[0], Controller()
    with monkeypatch.context() as patch:
        patch.setattr(work_lease, "TAKEOVER_AFTER_S", 0.0)  # The first controller counts as stalled.
        second.run_once()
    first.run_once()
    assert Lease.objects.get().holder == second._lease.holder
    assert (Delivery.objects.get().outcome, Delivery.objects.get().due) == (Outcome.DELIVERED, None)
    first._postman.close()


def test_controller_stores_outcomes_when_it_ends(sent: tuple[Controller, Receiver]) -> None:
    ended = threading.Event()
    ended.set()
    sent[0].run(ended)
    assert (Delivery.objects.get().outcome, Delivery.objects.get().due) == (Outcome.DELIVERED, None)
