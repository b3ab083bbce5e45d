"""Webhooks as their owners have them: who sees one, what is refused, how many there may be, their pages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Delivery, Job, Outcome, Webhook
from jobs.people.notifications import outbox, webhooks
from jobs.people.notifications.delivery_worker import DeliveryWorker
from jobs.people.notifications.webhook_transport import get_secret
from jobs.queue import actions
from tests.jobs.telling.receivers import hook_of
from tests.planner.wrong_specs import GOOD

pytestmark = pytest.mark.usefixtures("local_receivers")


def test_strangers_learn_nothing_of_a_webhook(
    owner: User, stranger: User, staff: User, api: Callable[[User], APIClient], client: Client
) -> None:
    hook = hook_of(owner, "https://a.example/")
    sent = webhooks.send_ping(owner, hook)
    assert sent is not None
    path = f"projects/default/webhooks/{hook.id}"
    posts = ("rotate", "ping", f"deliveries/{sent.key}/redeliver")
    assert api(stranger).get("/api/v1/projects/default/webhooks").json() == []
    assert len(api(staff).get("/api/v1/projects/default/webhooks").json()) == 1
    for answer in (
        api(stranger).get(f"/api/v1/{path}"),
        api(stranger).delete(f"/api/v1/{path}"),
        api(stranger).patch(f"/api/v1/{path}", {"url": "https://mine.example"}, format="json"),
        api(stranger).get(f"/api/v1/{path}/deliveries"),
        *(api(stranger).post(f"/api/v1/{path}/{each}") for each in posts),
    ):
        assert answer.status_code == 404
    client.force_login(stranger)
    assert client.get(f"/{path}/").status_code == 404
    for each in ("rotate/", "ping/", "change/", "delete/", f"deliveries/{sent.key}/again/"):
        assert client.post(f"/{path}/{each}").status_code == 404
    assert hook.url not in client.get("/projects/default/webhooks/").content.decode()
    assert Webhook.objects.get().generation == 1


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"url": "http://93.184.216.34/"}, "url"),
        ({"url": "ftp://hooks.example/"}, "url"),
        ({"url": "https://user:word@hooks.example/"}, "url"),
        ({"url": "https://hooks.example/#x"}, "url"),
        ({"url": "https://169.254.169.254/"}, "url"),
        ({"url": "https://[::ffff:10.0.0.1]/"}, "url"),
        ({"url": "https://2130706434/"}, "url"),
        ({"url": "https://"}, "url"),
        ({"url": "https://a\x00b/"}, "url"),
        ({"url": "https://xn--\u00e9/"}, "url"),
        ({"url": "https://hooks.example:99999/"}, "url"),
        ({"url": "https://hooks.example:\uff14\uff14\uff13/"}, "url"),
        ({"url": "https://hooks.example:\uff11\uff18\uff18/"}, "url"),
        ({"url": "https://[2606:4700::1]:\u0661\u0662/"}, "url"),
        ({"url": "https://[2606:4700::1%25eth0]/"}, "url"),
        ({"name": ""}, "name"),
        ({"states": ["burnt"]}, "states.0"),
        ({"job": "../.."}, "job"),
        ({"everybody": True}, "everybody"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_senseless_webhook_is_refused_by_field(
    given: dict[str, Any], field: str, owner: User, api: Callable[[User], APIClient]
) -> None:
    body = {"name": "chat", "url": "https://hooks.example/7", **given}
    answer = api(owner).post("/api/v1/projects/default/webhooks", body, format="json")
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not Webhook.objects.exists()


def test_no_more_webhooks_and_no_older_messages_than_their_bounds(
    owner: User, api: Callable[[User], APIClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MAX_OWNER_WEBHOOKS", 1)
    monkeypatch.setattr(outbox, "MAX_RECEIVER_DELIVERIES", 3)
    hook = hook_of(owner, "https://a.example/")
    told = api(owner).post(
        "/api/v1/projects/default/webhooks", {"name": "b", "url": "https://b.example/"}, format="json"
    )
    assert "the maximum is 1." in told.json()["errors"][0]["message"]
    Delivery.objects.bulk_create(Delivery(webhook=hook, event="ping", body="{}") for _ in range(5))
    newest = list(Delivery.objects.values_list("pk", flat=True)[:3])
    assert outbox.delete_old_deliveries() == 2
    assert list(Delivery.objects.values_list("pk", flat=True)) == newest
    Delivery.objects.filter(pk=newest[0]).update(created=timezone.now() - timedelta(days=31))
    assert outbox.delete_old_deliveries() == 1


def test_the_pages_make_show_and_change(owner: User, client: Client) -> None:
    client.force_login(owner)
    made = client.post(
        "/projects/default/webhooks/make/",
        {"name": "<img src=x onerror=1>", "url": "https://a.example/", "states": ["failed", "lost"]},
    )
    hook = Webhook.objects.get()
    assert get_secret(hook) in made.content.decode()
    assert made["Cache-Control"] == "no-store"
    path = f"/projects/default/webhooks/{hook.id}/"
    client.post(f"{path}ping/")
    Delivery.objects.update(
        due=None, outcome="given up", tries=[{"at": "", "seconds": 0.1, "status": None, "words": "<b>no</b>"}]
    )
    page = client.get(path).content.decode()
    assert "<img src=x" not in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert get_secret(hook) not in page
    assert "Send again" in client.get(f"{path}?part=log").content.decode()
    client.post(f"{path}change/", {"active": "false"})
    assert Webhook.objects.get().active is False
    told = client.post(f"{path}change/", {"name": "x", "url": "https://10.0.0.1/"}, follow=True).content.decode()
    assert "resolves to a private address" in told
    assert client.post(f"{path}delete/").status_code == 302
    assert not Webhook.objects.exists()
    assert Job.objects.count() == 0


def test_webhooks_of_a_closed_account_are_off_and_what_waited_is_over(owner: User, client: Client) -> None:
    """Wherever it was closed; who opens it again turns them on again."""
    hook = hook_of(owner, "https://receiver.example")
    paused = hook_of(owner, "https://other.example")
    actions.submit(owner, GOOD)
    Webhook.objects.filter(pk=paused.pk).update(active=False)
    sent = Delivery.objects.create(webhook=hook, due=None, outcome=Outcome.DELIVERED)
    client.force_login(User.objects.create_superuser("root"))
    joined = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    path = f"/admin/auth/user/{owner.pk}/change/"
    assert client.post(path, {"username": owner.username, **joined}).status_code == 302
    waited = list(Delivery.objects.exclude(pk=sent.pk))
    assert [(one.outcome, one.due) for one in waited] == [(Outcome.GIVEN_UP, None)] * 2
    assert {one.tries[0]["words"] for one in waited} == {"not sent: the recipient can no longer see the job"}
    written = AuditEntry.objects.get(kind="webhook")
    assert (written.who, written.what, written.name) == ("root", "turn off", hook.id)
    assert client.post(path, {"username": owner.username, "is_active": "on", **joined}).status_code == 302
    assert not Webhook.objects.filter(active=True).exists()
    sent.refresh_from_db()
    assert sent.outcome == Outcome.DELIVERED


def test_what_waits_for_an_account_closed_in_the_database_is_over_with_the_next_turn(owner: User) -> None:
    hook_of(owner, "https://receiver.example")
    actions.submit(owner, GOOD)
    User.objects.filter(pk=owner.pk).update(is_active=False)
    DeliveryWorker().run_once()
    assert Delivery.objects.get().outcome == Outcome.GIVEN_UP


def test_one_that_is_told_of_nothing_says_why(
    owner: User, staff: User, api: Callable[[User], APIClient], client: Client
) -> None:
    mine, everybodys = hook_of(owner, "https://a.example"), hook_of(staff, "https://b.example")
    Webhook.objects.filter(pk=everybodys.pk).update(everybody=True)
    heard = {hook["id"]: hook["silent"] for hook in api(staff).get("/api/v1/projects/default/webhooks").json()}
    assert heard == {mine.id: "", everybodys.id: ""}
    root = User.objects.create_superuser("root")
    User.objects.filter(pk=owner.pk).update(is_active=False)
    User.objects.filter(pk=staff.pk).update(is_staff=False)
    closed = f"the account of user {owner.username} is disabled"
    lost = f"user {staff.username} is no longer an admin of project default"
    heard = {hook["id"]: hook["silent"] for hook in api(root).get("/api/v1/projects/default/webhooks").json()}
    assert heard == {mine.id: closed, everybodys.id: lost}
    client.force_login(root)
    page = client.get("/projects/default/webhooks/").content.decode()
    assert page.count("inactive</span>") == 2
    assert closed in page
    page = client.get(f"/projects/default/webhooks/{mine.id}/").content.decode()
    assert f"Inactive: {closed}." in page
    assert "goes out at once" not in page
