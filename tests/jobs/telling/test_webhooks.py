"""Webhooks against real receivers: what they are told, and that a bad one holds up nothing and leads nowhere."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Delivery, Outcome, StateChange, Status, Webhook
from jobs.people.notifications import webhook_transport, webhooks
from jobs.people.notifications.delivery_worker import BATCH_SIZE, RETRY_DURATION, DeliveryWorker, compute_next_try
from jobs.people.notifications.webhook_transport import get_secret, get_valid_secrets, sign_body
from jobs.queue import actions, lifecycle
from tests.jobs.telling.receivers import ENDLESS, answering, hook_of, receiver
from tests.planner.wrong_specs import GOOD
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.usefixtures("local_receivers")
OK = answering("204 No Content")


@pytest.fixture
def postman() -> Iterator[DeliveryWorker]:
    made = DeliveryWorker()
    yield made
    made.close()


def carried(postman: DeliveryWorker, *wanted: Delivery, timeout_s: float = 20.0) -> None:
    """Turns until each was tried once, none of which waits for a receiver."""
    keys = [delivery.pk for delivery in wanted]

    def tried() -> bool:
        began = time.monotonic()
        postman.run_once()
        assert time.monotonic() - began < 5.0, "the controller's thread waited"
        return all(Delivery.objects.get(pk=key).tries for key in keys)

    wait_until(tried, "every delivery was tried", timeout_s)


def verified(secret: str, header: str, body: bytes) -> bool:
    """As Stripe's documentation tells receivers to do by hand."""
    parts = [part.partition("=")[::2] for part in header.split(",")]
    told = next(value for name, value in parts if name == "t")
    wanted = hmac.new(secret.encode(), told.encode() + b"." + body, hashlib.sha256).hexdigest()
    fresh = abs(time.time() - int(told)) < 300
    return fresh and any(hmac.compare_digest(wanted, value) for name, value in parts if name == "v1")


def test_a_receiver_is_told_of_each_change_in_order_and_can_check_who_said_it(
    owner: User, postman: DeliveryWorker
) -> None:
    with receiver(OK) as there:
        hook = hook_of(owner, there)
        job, _ = actions.submit(owner, GOOD)
        actions.cancel(job, "owner")
        carried(postman, *Delivery.objects.all())
        wait_until(lambda: len(there.heard) == 3, "all three arrived")
        told = [json.loads(heard.body) for heard in there.heard]
        assert [each["job"]["status"] for each in told] == ["queued", "cancelling", "cancelled"]
        assert told[0]["job"] | {"name": "", "kind": ""} == {
            "id": job.id,
            "name": "",
            "kind": "",
            "project": "default",
            "owner": "owner",
            "attempt": 1,
            "status": "queued",
            "url": f"https://board.example/jobs/{job.id}/",
        }
        assert told[2]["reason"] == "cancelled by owner"
        heard = there.heard[0]
        assert (heard.target, heard.headers["Host"]) == ("/hook?a=1", f"127.0.0.1:{there.port}")
        assert heard.headers["Meshboard-Delivery"] == told[0]["id"]
        assert verified(get_secret(hook), heard.headers["Meshboard-Signature"], heard.body)
        assert not verified(get_secret(hook), heard.headers["Meshboard-Signature"], heard.body + b" ")
        assert not verified("mbw_another", heard.headers["Meshboard-Signature"], heard.body)
    assert set(Delivery.objects.values_list("outcome", "due")) == {(Outcome.DELIVERED, None)}


def test_after_a_rotation_both_secrets_hold_for_a_day_and_no_longer(
    owner: User, api: Callable[[User], APIClient]
) -> None:
    made = api(owner).post(
        "/api/v1/projects/default/webhooks", {"name": "ci", "url": "https://ci.example"}, format="json"
    )
    path, first = f"/api/v1/projects/default/webhooks/{made.json()['id']}", made.json()["secret"]
    assert made["Cache-Control"] == "no-store"
    second = api(owner).post(f"{path}/rotate").json()["secret"]
    assert first not in api(owner).get(path).content.decode()
    hook, now, body = Webhook.objects.get(), int(time.time()), b"{}"
    both = sign_body(get_valid_secrets(hook), now, body)
    assert verified(first, both, body)
    assert verified(second, both, body)
    hook.rotated = timezone.now() - timedelta(days=1, seconds=1)
    later = sign_body(get_valid_secrets(hook), now, body)
    assert verified(second, later, body)
    assert not verified(first, later, body)
    assert [entry.what for entry in AuditEntry.objects.filter(kind="webhook")] == ["rotate", "make"]
    assert first not in json.dumps(list(AuditEntry.objects.values("before", "after")))


def test_bad_receivers_hold_up_nobody_and_nothing_inside_is_reached(
    owner: User, postman: DeliveryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_transport, "POST_TIMEOUT_S", 4.0)
    with contextlib.ExitStack() as stack:
        trap = stack.enter_context(receiver(OK))
        silent = stack.enter_context(receiver(None))
        broken = stack.enter_context(receiver(answering("500 No")))
        endless = stack.enter_context(receiver(ENDLESS, endless=True))
        babbling = stack.enter_context(receiver(b"HTTP/1.1 200 OK\r\nX: ", endless=True))
        moved = stack.enter_context(receiver(answering("302 Found", f"Location: http://127.0.0.1:{trap.port}/")))
        good = stack.enter_context(receiver(OK))
        closed = socket.create_server(("127.0.0.1", 0))
        nobody = closed.getsockname()[1]
        closed.close()
        urls = {
            "silent": silent,
            "broken": broken,
            "endless": endless,
            "babbling": babbling,
            "moved": moved,
            "nobody": f"http://127.0.0.1:{nobody}/",
            "rebound": f"http://127.0.0.2:{trap.port}/",
            "good": good,
        }
        made = {name: webhooks.send_ping(owner, hook_of(owner, url)) for name, url in urls.items()}
        sent = [delivery for delivery in made.values() if delivery is not None]
        assert len(sent) == len(urls)
        good_one = made["good"]
        assert good_one is not None
        began = time.monotonic()
        carried(postman, good_one)
        assert time.monotonic() - began < 4.0, "it did not wait for the silent one"
        carried(postman, *sent)
        by = {name: Delivery.objects.get(pk=each.pk) for name, each in made.items() if each is not None}
        words = {name: delivery.tries[0]["words"] for name, delivery in by.items()}
        assert words["silent"] == "the receiver did not answer within 4 s"
        assert words["broken"] == "answered 500"
        assert words["endless"] == "answered 200"
        assert "RemoteProtocolError" in words["babbling"] or "no answer" in words["babbling"]
        assert words["moved"] == "answered 302, redirects are not followed"
        assert "ConnectError" in words["nobody"]
        assert "resolves to a private address" in words["rebound"]
        assert trap.connections == 0
        assert endless.sent_bytes < 2**24, "10 GB were offered, and not taken"
        assert {name for name, each in by.items() if each.outcome == Outcome.DELIVERED} == {"good", "endless"}
        assert all(each.due > each.created + timedelta(seconds=5) for each in by.values() if each.due is not None)


def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(
    owner: User, postman: DeliveryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look-up of a name that rebinds leads to the trap."""
    real, asked = socket.getaddrinfo, []

    def rebinding(host: Any, port: Any, *rest: Any, **named: Any) -> Any:
        if host != "hooks.example":
            return real(host, port, *rest, **named)
        asked.append(host)
        return real("127.0.0.1" if len(asked) == 1 else "127.0.0.2", port, *rest, **named)

    with receiver(OK) as there:
        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        sent = webhooks.send_ping(owner, hook_of(owner, f"http://hooks.example:{there.port}/x"))
        assert sent is not None
        carried(postman, sent)
        assert Delivery.objects.get().tries[0]["words"] == "answered 204"
        assert asked == ["hooks.example"]
        assert there.heard[0].headers["Host"] == f"hooks.example:{there.port}"


@pytest.mark.parametrize(
    ("named", "certified", "status"),
    [
        ("hooks.example", "hooks.example", 204),
        ("hooks.example", "other.example", None),
        ("straße.example", "xn--strae-oqa.example", 204),
        ("straße.example", "strasse.example", None),
    ],
)
def test_the_certificate_is_that_of_the_name(
    named: str,
    certified: str,
    status: int | None,
    owner: User,
    postman: DeliveryWorker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Sharp s is a letter of its own since IDNA 2008; before, it was ss, a name that somebody else may have."""
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.pem")]
    name = ["-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{certified}"]
    kind = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    subprocess.run([*kind, *name, *files], check=True, capture_output=True)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    real, asked = socket.getaddrinfo, []

    def leading_here(host: Any, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return real("127.0.0.1", *rest, **named)

    with receiver(OK, tls=shown) as there:
        monkeypatch.setattr(socket, "getaddrinfo", leading_here)
        sent = webhooks.send_ping(owner, hook_of(owner, f"https://{named}:{there.port}/"))
        assert sent is not None
        carried(postman, sent)
        assert asked[0] == httpx.URL(f"https://{named}/").raw_host.decode(), "the name that the Host says"
        (told,) = Delivery.objects.get().tries
        assert told["status"] == status, told
        assert bool(there.heard) == (status is not None)
        assert status is not None or "CERTIFICATE_VERIFY_FAILED" in told["words"]


def test_what_is_told_is_written_with_the_change_or_not_at_all(owner: User) -> None:
    hook_of(owner, "https://hooks.example/")
    job, _ = actions.submit(owner, GOOD)
    assert Delivery.objects.count() == 1
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        assert lifecycle.change_status(job.id, 1, Status.CANCELLING, "no")
        raise ZeroDivisionError
    assert Delivery.objects.count() == StateChange.objects.count() == 1
    assert not lifecycle.change_status(job.id, 1, Status.SUCCEEDED, "it never ran")
    assert Delivery.objects.count() == 1


def test_changes_of_status_are_written_in_one_place() -> None:
    written = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jobs").rglob("*.py")
        if "StateChange.objects.create" in path.read_text() or "StateChange.objects.bulk_create" in path.read_text()
    ]
    assert written == ["jobs/people/notifications/outbox.py"], "beside it, nobody would be told"


def test_who_is_told_of_what(owner: User, stranger: User, staff: User) -> None:
    own = hook_of(owner, "https://a.example/", states=["queued"])
    everybody = hook_of(staff, "https://b.example/", everybody=True)
    lost_the_right = hook_of(stranger, "https://c.example/", everybody=True)
    paused = hook_of(owner, "https://d.example/", active=False)
    mine, _ = actions.submit(owner, GOOD)
    only = hook_of(owner, "https://e.example/", job=mine.id)
    theirs, _ = actions.submit(stranger, GOOD)
    actions.cancel(mine, "owner")

    def told(hook: Webhook) -> list[tuple[str, str]]:
        rows = Delivery.objects.filter(webhook=hook).order_by("id")
        return [(row.job, json.loads(row.body)["job"]["status"]) for row in rows]

    assert told(own) == [(mine.id, "queued")]
    assert told(everybody) == [
        (mine.id, "queued"),
        (theirs.id, "queued"),
        (mine.id, "cancelling"),
        (mine.id, "cancelled"),
    ]
    assert told(lost_the_right) == told(paused) == []
    assert told(only) == [(mine.id, "cancelling"), (mine.id, "cancelled")]


def test_what_waits_is_not_told_to_whoever_lost_the_right_meanwhile(
    owner: User, staff: User, postman: DeliveryWorker
) -> None:
    with receiver(OK) as there:
        hook_of(staff, there, everybody=True)
        actions.submit(owner, GOOD)
        User.objects.filter(pk=staff.pk).update(is_staff=False)
        carried(postman, Delivery.objects.get())
        assert there.heard == []
    told = Delivery.objects.get()
    assert (told.outcome, told.due) == (Outcome.GIVEN_UP, None)
    assert told.tries[0]["words"] == "not sent: the recipient can no longer see the job"


def test_a_day_of_tries_with_longer_and_longer_pauses() -> None:
    began = now = timezone.now()
    pauses = []
    while (due := compute_next_try(len(pauses) + 1, began, now)) is not None:
        pauses.append((due - now).total_seconds())
        now = due
    assert 12 <= len(pauses) <= 18
    assert 7.5 <= pauses[0] <= 12.5
    least = 0.75 / 1.25  # of two of the longest, that much apart by chance
    assert all(later > earlier * (least - 0.001) for earlier, later in itertools.pairwise(pauses))
    assert max(pauses) <= 4 * 3600 * 1.25
    assert timedelta(hours=16) < now - began <= RETRY_DURATION
    assert len({compute_next_try(1, began, began) for _ in range(20)}) > 10, "not all at once"


def test_given_up_after_a_day_and_sent_again_by_hand(
    owner: User, postman: DeliveryWorker, api: Callable[[User], APIClient]
) -> None:
    with receiver(answering("503 Away")) as there:
        sent = webhooks.send_ping(owner, hook_of(owner, there))
        assert sent is not None
        Delivery.objects.update(since=timezone.now() - RETRY_DURATION)
        carried(postman, sent)
    given_up = Delivery.objects.get()
    assert (given_up.outcome, given_up.due) == (Outcome.GIVEN_UP, None)
    with receiver(OK) as there:
        hook = Webhook.objects.get()
        Webhook.objects.update(url=f"http://127.0.0.1:{there.port}/")
        path = f"/api/v1/projects/default/webhooks/{hook.id}/deliveries/{given_up.key}/redeliver"
        assert api(owner).post(path).status_code == 202
        assert api(owner).post(path).status_code == 409
        wait_until(lambda: postman.run_once() or there.heard, "it was sent again")
        wait_until(
            lambda: postman.run_once() or Delivery.objects.get().outcome == Outcome.DELIVERED, "that is written down"
        )
        assert there.heard[0].headers["Meshboard-Delivery"] == given_up.key
    assert [each["status"] for each in Delivery.objects.get().tries] == [503, 204]


def test_whoever_dies_on_the_way_leaves_it_to_the_next_under_the_same_key(owner: User, postman: DeliveryWorker) -> None:
    with receiver(OK) as there:
        sent = webhooks.send_ping(owner, hook_of(owner, there))
        assert sent is not None
        dead = DeliveryWorker()
        dead.run_once()
        wait_until(lambda: there.heard, "the first one sent it")
        dead.close()
        postman.run_once()
        assert not Delivery.objects.filter(due__lte=timezone.now()).exists(), "claimed"
        Delivery.objects.update(due=timezone.now())  # five minutes later
        carried(postman, sent)
        assert len({heard.headers["Meshboard-Delivery"] for heard in there.heard}) == 1
        assert len(there.heard) == 2


def test_what_is_on_its_way_at_the_end_is_cut_off(owner: User) -> None:
    with receiver(None) as there:
        webhooks.send_ping(owner, hook_of(owner, there))
        ending = DeliveryWorker()
        ending.run_once()
        wait_until(lambda: there.heard, "it was sent, and waits for its answer")
        ending.close()
        loop = ending._loop
        assert loop is not None
        wait_until(loop.is_closed, "the thread is at its end")
        assert len(ending._results) == 1, "and the batch at its own"


def test_a_receiver_that_fails_is_tried_once_a_turn_and_the_rest_wait(owner: User, postman: DeliveryWorker) -> None:
    with receiver(answering("500 No")) as there:
        hook = hook_of(owner, there)
        body = json.dumps({"id": "", "event": "ping", "created": "", "reason": "", "job": None})
        Delivery.objects.bulk_create(Delivery(webhook=hook, event="ping", body=body) for _ in range(BATCH_SIZE + 5))
        first = Delivery.objects.order_by("id")[0]
        carried(postman, first)
        assert Delivery.objects.filter(tries=[]).count() >= BATCH_SIZE
