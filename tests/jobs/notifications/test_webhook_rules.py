"""Access to webhooks, their validation, their limits, and their pages."""

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
from jobs.people import tokens
from jobs.people.notifications import outbox, webhooks
from jobs.people.notifications.delivery_worker import DeliveryWorker
from jobs.people.notifications.webhook_transport import get_secret
from jobs.queue import actions
from tests.jobs.notifications.receivers import make_webhook
from tests.planner.wrong_specs import GOOD

pytestmark = pytest.mark.usefixtures("local_receivers")


def test_hides_webhooks_from_other_users(
    owner: User, stranger: User, staff: User, api: Callable[[User], APIClient], client: Client
) -> None:
    webhook = make_webhook(owner, "https://a.example/")
    delivery = webhooks.send_ping(owner, webhook)
    assert delivery is not None
    path = f"projects/default/webhooks/{webhook.id}"
    posts = ("rotate", "ping", f"deliveries/{delivery.key}/redeliver")
    assert api(stranger).get("/api/v1/projects/default/webhooks").json() == []
    assert len(api(staff).get("/api/v1/projects/default/webhooks").json()) == 1
    for response in (
        api(stranger).get(f"/api/v1/{path}"),
        api(stranger).delete(f"/api/v1/{path}"),
        api(stranger).patch(f"/api/v1/{path}", {"url": "https://mine.example"}, format="json"),
        api(stranger).get(f"/api/v1/{path}/deliveries"),
        *(api(stranger).post(f"/api/v1/{path}/{each}") for each in posts),
    ):
        assert response.status_code == 404
    client.force_login(stranger)
    assert client.get(f"/{path}/").status_code == 404
    for each in ("rotate/", "ping/", "change/", "delete/", f"deliveries/{delivery.key}/again/"):
        assert client.post(f"/{path}/{each}").status_code == 404
    assert webhook.url not in client.get("/projects/default/webhooks/").content.decode()
    assert Webhook.objects.get().generation == 1


def test_token_without_operate_lists_only_own_webhooks_of_an_admin(owner: User, staff: User) -> None:
    make_webhook(owner, "https://a.example/")
    listed = []
    for scopes in (["read"], ["read", "operate"]):
        request = tokens.ApiTokenRequest.model_validate({"name": "t", "scopes": scopes})
        client = APIClient(headers={"Authorization": f"Token {tokens.create_token(staff, request).text}"})
        listed.append(len(client.get("/api/v1/projects/default/webhooks").json()))
    assert listed == [0, 1]


@pytest.mark.parametrize(
    ("change", "field"),
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
def test_rejects_invalid_webhooks_by_field(
    change: dict[str, Any], field: str, owner: User, api: Callable[[User], APIClient]
) -> None:
    body = {"name": "chat", "url": "https://hooks.example/7", **change}
    response = api(owner).post("/api/v1/projects/default/webhooks", body, format="json")
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]
    assert not Webhook.objects.exists()


def test_limits_webhooks_and_stored_deliveries(
    owner: User, api: Callable[[User], APIClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MAX_OWNER_WEBHOOKS", 1)
    monkeypatch.setattr(outbox, "MAX_RECEIVER_DELIVERIES", 3)
    hook = make_webhook(owner, "https://a.example/")
    response = api(owner).post(
        "/api/v1/projects/default/webhooks", {"name": "b", "url": "https://b.example/"}, format="json"
    )
    assert "the maximum is 1." in response.json()["errors"][0]["message"]
    Delivery.objects.bulk_create(Delivery(webhook=hook, event="ping", body="{}") for _ in range(5))
    newest = list(Delivery.objects.values_list("pk", flat=True)[:3])
    assert outbox.delete_old_deliveries() == 2
    assert list(Delivery.objects.values_list("pk", flat=True)) == newest
    Delivery.objects.filter(pk=newest[0]).update(created=timezone.now() - timedelta(days=31))
    assert outbox.delete_old_deliveries() == 1


def test_pages_create_show_and_change_webhooks(owner: User, client: Client) -> None:
    client.force_login(owner)
    response = client.post(
        "/projects/default/webhooks/make/",
        {"name": "<img src=x onerror=1>", "url": "https://a.example/", "states": ["failed", "lost"]},
    )
    hook = Webhook.objects.get()
    assert get_secret(hook) in response.content.decode()
    assert response["Cache-Control"] == "no-store"
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
    error_page = client.post(f"{path}change/", {"name": "x", "url": "https://10.0.0.1/"}, follow=True).content.decode()
    assert "resolves to a private address" in error_page
    assert client.post(f"{path}delete/").status_code == 302
    assert not Webhook.objects.exists()
    assert Job.objects.count() == 0


def test_disabled_account_turns_off_its_webhooks(owner: User, client: Client) -> None:
    """Enabling the account again does not turn the webhooks on."""
    hook = make_webhook(owner, "https://receiver.example")
    paused = make_webhook(owner, "https://other.example")
    actions.submit(owner, GOOD)
    Webhook.objects.filter(pk=paused.pk).update(active=False)
    delivered = Delivery.objects.create(webhook=hook, due=None, outcome=Outcome.DELIVERED)
    client.force_login(User.objects.create_superuser("root"))
    join_date = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    path = f"/admin/auth/user/{owner.pk}/change/"
    assert client.post(path, {"username": owner.username, **join_date}).status_code == 302
    cancelled = list(Delivery.objects.exclude(pk=delivered.pk))
    assert [(one.outcome, one.due) for one in cancelled] == [(Outcome.GIVEN_UP, None)] * 2
    assert {one.tries[0]["words"] for one in cancelled} == {"not sent: the recipient can no longer see the job or host"}
    entry = AuditEntry.objects.get(kind="webhook")
    assert (entry.who, entry.what, entry.name) == ("root", "turn off", hook.id)
    assert client.post(path, {"username": owner.username, "is_active": "on", **join_date}).status_code == 302
    assert not Webhook.objects.filter(active=True).exists()
    delivered.refresh_from_db()
    assert delivered.outcome == Outcome.DELIVERED


def test_gives_up_deliveries_of_an_account_disabled_in_sql(owner: User) -> None:
    make_webhook(owner, "https://receiver.example")
    actions.submit(owner, GOOD)
    User.objects.filter(pk=owner.pk).update(is_active=False)
    DeliveryWorker().run_once()
    assert Delivery.objects.get().outcome == Outcome.GIVEN_UP


def test_shows_why_a_webhook_is_inactive(
    owner: User, staff: User, api: Callable[[User], APIClient], client: Client
) -> None:
    own, general = make_webhook(owner, "https://a.example"), make_webhook(staff, "https://b.example")
    Webhook.objects.filter(pk=general.pk).update(everybody=True)
    reasons = {hook["id"]: hook["silent"] for hook in api(staff).get("/api/v1/projects/default/webhooks").json()}
    assert reasons == {own.id: "", general.id: ""}
    root = User.objects.create_superuser("root")
    User.objects.filter(pk=owner.pk).update(is_active=False)
    User.objects.filter(pk=staff.pk).update(is_staff=False)
    account_reason = f"the account of user {owner.username} is disabled"
    rights_reason = f"user {staff.username} is no longer an admin of project default"
    reasons = {hook["id"]: hook["silent"] for hook in api(root).get("/api/v1/projects/default/webhooks").json()}
    assert reasons == {own.id: account_reason, general.id: rights_reason}
    client.force_login(root)
    page = client.get("/projects/default/webhooks/").content.decode()
    assert page.count("inactive</span>") == 2
    assert account_reason in page
    page = client.get(f"/projects/default/webhooks/{own.id}/").content.decode()
    assert f"Inactive: {account_reason}." in page
    assert "goes out at once" not in page
