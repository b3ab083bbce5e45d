"""Mails about job states, sent through a real SMTP server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from email.message import EmailMessage
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import (
    DEFAULT_PROJECT,
    AuditEntry,
    Delivery,
    Job,
    MailWish,
    Membership,
    Outcome,
    Project,
    Role,
    Status,
    describe_status,
)
from jobs.people.notifications import outbox
from jobs.people.notifications.delivery_worker import DeliveryWorker
from jobs.queue import actions, lifecycle
from tests.planner.wrong_specs import GOOD
from tests.support.processes import wait_until
from webapp.runner import find_free_port


@pytest.fixture
def worker() -> Iterator[DeliveryWorker]:
    worker = DeliveryWorker()
    yield worker
    worker.close()


def send_all(worker: DeliveryWorker) -> None:
    def is_empty() -> bool:
        worker.run_once()
        return not Delivery.objects.filter(due__isnull=False).exists()

    wait_until(is_empty, "every mail is sent", 20)


def choose_states(user: User, project: str = "", states: tuple[str, ...] = ("cancelled",), address: str = "") -> None:
    User.objects.filter(pk=user.pk).update(email=address or f"{user.username}@people.example")
    MailWish.objects.create(user=user, project=project, states=list(states))


def test_sends_mail_about_the_chosen_states(
    owner: User, stranger: User, staff: User, inbox: list[EmailMessage], worker: DeliveryWorker
) -> None:
    apollo = Project.objects.create(name="apollo")
    Membership.objects.create(user=owner, project=apollo, role=Role.SUBMITTER)
    choose_states(owner)
    choose_states(stranger, "apollo", ("queued", "cancelled"))
    choose_states(staff, "apollo")
    job, _ = actions.submit(owner, {**GOOD, "project": "apollo"})
    elsewhere, _ = actions.submit(stranger, GOOD)
    for each in (job, elsewhere):
        actions.cancel(each, "owner")
    send_all(worker)
    assert sorted(mail["To"] for mail in inbox) == ["owner@people.example", "staff@people.example"]
    mail = next(mail for mail in inbox if mail["To"].startswith("owner"))
    assert mail["From"] == "meshboard@board.example"
    assert mail["Subject"] == f"{job.name} was cancelled"
    assert mail.get_content().startswith(f"{job.name} ({job.id}) was cancelled.")
    assert mail["Auto-Submitted"] == "auto-generated"
    assert f"https://board.example/jobs/{job.id}/" in mail.get_content()
    assert "cancelled by owner" in mail.get_content()
    assert set(Delivery.objects.values_list("outcome", flat=True)) == {Outcome.DELIVERED}


def test_sends_no_mail_to_former_members_or_disabled_users(
    owner: User, stranger: User, staff: User, inbox: list[EmailMessage], worker: DeliveryWorker
) -> None:
    apollo = Project.objects.create(name="apollo")
    for user in (owner, stranger):
        Membership.objects.create(user=user, project=apollo, role=Role.SUBMITTER)
    disabled = User.objects.create_user("gone", is_active=False)
    choose_states(owner)
    choose_states(staff, "apollo")
    choose_states(stranger, "apollo")
    choose_states(disabled)
    job, _ = actions.submit(owner, {**GOOD, "project": "apollo"})
    actions.cancel(job, "owner")
    Job.objects.filter(pk=job.pk).update(owner=disabled)
    lifecycle.requeue(job.id, "again")
    actions.cancel(Job.objects.get(pk=job.pk), "owner")
    assert not Delivery.objects.filter(person=disabled).exists()
    Membership.objects.filter(user=stranger).delete()
    User.objects.filter(pk=staff.pk).update(is_active=False)
    Membership.objects.filter(user=owner).delete()
    send_all(worker)
    assert [mail["To"] for mail in inbox] == ["owner@people.example"], "owners get mail about their own jobs"
    deliveries = Delivery.objects.filter(person__in=(stranger, staff))
    assert set(deliveries.values_list("outcome", "due")) == {(Outcome.GIVEN_UP, None)}


@pytest.mark.usefixtures("inbox")
def test_page_shows_how_to_add_a_missing_address(owner: User, client: Client, settings: Any) -> None:
    settings.EMAIL_HOST = "mail.example"
    admin = User.objects.create_superuser("admin", password="admin-password")
    for user, hint in (
        (owner, "Only staff can change your email address"),
        (admin, f'href="/admin/auth/user/{admin.pk}/change/"'),
    ):
        client.force_login(user)
        for path in ("/account/", "/notifications/"):
            page = client.get(path).content.decode()
            assert "Your account has no email address" in page
            assert hint in page
    User.objects.filter(pk=owner.pk).update(email="owner@people.example")
    client.force_login(owner)
    assert "owner@people.example" in client.get("/account/").content.decode()


def test_describes_every_state() -> None:
    assert [describe_status(state) for state in Status] == [
        *("is queued", "is starting", "is running", "is unreachable", "is being cancelled"),
        *("succeeded", "failed", "was lost", "was cancelled"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "run\r\nBcc: everybody@example.org",
        "run\nBcc: everybody@example.org",
        "run\u2028Bcc: everybody@example.org",
        "run\x0bBcc: everybody@example.org\r\n\r\nanother body",
        "=?utf-8?q?run=0D=0ABcc:_everybody@example.org?=",
        "r" * 100,
    ],
)
def test_job_name_cannot_add_a_mail_header(
    name: str, owner: User, inbox: list[EmailMessage], worker: DeliveryWorker
) -> None:
    choose_states(owner, address="owner@people.example")
    job, _ = actions.submit(owner, GOOD)
    Job.objects.update(name=name)
    lifecycle.change_status(job.id, 1, Status.CANCELLING, "x\r\n.\r\nMAIL FROM:<x@example.org>")
    lifecycle.change_status(job.id, 1, Status.CANCELLED, "y\r\n.\r\nRCPT TO:<everybody@example.org>\r\n")
    send_all(worker)
    (mail,) = inbox
    assert mail["Bcc"] is None
    assert mail["X-RcptTo"] == mail["To"] == "owner@people.example"
    assert str(mail["Subject"]).endswith("was cancelled")
    assert len(str(mail["Subject"])) <= 75
    assert "RCPT TO:<everybody@example.org>" in mail.get_content()


def test_mail_waits_while_the_server_is_unreachable(
    owner: User, inbox: list[EmailMessage], worker: DeliveryWorker, settings: Any
) -> None:
    choose_states(owner)
    port, settings.EMAIL_PORT = settings.EMAIL_PORT, find_free_port()
    actions.cancel(actions.submit(owner, GOOD)[0], "owner")
    wait_until(lambda: worker.run_once() or Delivery.objects.get().tries, "the mail was tried")
    assert Delivery.objects.get().outcome == Outcome.WAITING
    assert "ConnectionRefusedError" in Delivery.objects.get().tries[0]["words"]
    settings.EMAIL_PORT = port
    Delivery.objects.update(due=Delivery.objects.get().created)
    send_all(worker)
    assert len(inbox) == 1


def test_limits_mails_per_hour_and_needs_server_and_address(
    owner: User, stranger: User, inbox: list[EmailMessage], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_MAILS_PER_HOUR", 2)
    choose_states(owner, states=("queued",))
    choose_states(stranger, states=("queued",))
    User.objects.filter(pk=stranger.pk).update(email="")
    for _ in range(3):
        actions.submit(owner, GOOD)
        actions.submit(stranger, GOOD)
    assert list(Delivery.objects.values_list("person", flat=True)) == [owner.pk, owner.pk]
    Delivery.objects.all().delete()
    settings.EMAIL_HOST = ""
    actions.submit(owner, GOOD)
    assert not Delivery.objects.exists()


def test_page_saves_the_chosen_states(owner: User, staff: User, client: Client, settings: Any) -> None:
    settings.EMAIL_HOST = "mail.example"
    Project.objects.create(name="apollo")
    client.force_login(staff)
    shown = {"shown": ["", "default", "apollo"]}
    choices = {"project:": ["failed", "lost"], "project:apollo": ["succeeded"], **shown}
    client.post("/notifications/", choices)
    assert dict(MailWish.objects.filter(user=staff).values_list("project", "states")) == {
        "": ["failed", "lost"],
        "apollo": ["succeeded"],
    }
    assert client.get("/notifications/").content.decode().count(" checked") == 3
    for invalid in ({"project:": ["burnt"]}, {"project:nobodys": ["failed"]}):
        assert "does not exist." in client.post("/notifications/", invalid, follow=True).content.decode()
    assert MailWish.objects.filter(user=staff).count() == 2
    client.post("/notifications/", shown)
    assert not MailWish.objects.filter(user=staff).exists()
    client.force_login(owner)
    assert "apollo" not in client.get("/notifications/").content.decode()


def test_page_has_no_choices_without_a_mail_server(owner: User, client: Client, settings: Any) -> None:
    client.force_login(owner)
    for host, has_boxes in (("mail.example", True), ("", False)):
        settings.EMAIL_HOST = host
        page = client.get("/notifications/").content.decode()
        assert ('type="checkbox"' in page, "this board has no mail server" in page) == (has_boxes, not has_boxes)


def test_pages_and_searches_choices_of_200_projects(owner: User, client: Client) -> None:
    """Saving one page of projects keeps the choices of the other pages."""
    Project.objects.get_or_create(name=DEFAULT_PROJECT)  # A test that empties the tables can have deleted it.
    projects = Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(200))
    Membership.objects.bulk_create(Membership(user=owner, project=one, role=Role.VIEWER) for one in projects)
    client.force_login(owner)
    page = client.get("/notifications/")
    assert "1 to 20 of 201" in page.content.decode()
    assert "mission-150" not in page.content.decode()
    page_150 = client.get("/notifications/?q=mission-15")
    assert [wish.project for wish in page_150.context["wishes"]] == ["", *(f"mission-{n}" for n in range(150, 160))]
    shown = ["", *(f"mission-{n}" for n in range(150, 160))]
    response = client.post("/notifications/?q=mission-15", {"project:mission-155": ["failed"], "shown": shown})
    assert response.headers["Location"] == "/notifications/?q=mission-15"
    assert [wish.project for wish in client.get("/notifications/").context["wishes"]][:2] == ["", "mission-155"]
    client.post("/notifications/", {"project:": ["lost"], "shown": ["", "default", "mission-000"]})
    assert dict(MailWish.objects.values_list("project", "states")) == {"": ["lost"], "mission-155": ["failed"]}
    Membership.objects.filter(project__name="mission-155").delete()
    client.post("/notifications/", {"shown": ["", "default"]})
    assert not MailWish.objects.exists(), "choices for a project end with the membership"


def test_rest_saves_the_chosen_states(owner: User, staff: User, api: Callable[[User], APIClient]) -> None:
    """A foreign project is rejected like an unknown one, and a rejected request changes nothing."""
    Project.objects.create(name="apollo")
    all_projects, apollo = (
        {"project": None, "states": ["failed"]},
        {"project": "apollo", "states": ["succeeded", "lost"]},
    )
    client = api(staff)
    preferences = client.put("/api/v1/notifications", {"wishes": [all_projects, apollo]}, format="json").json()
    assert preferences == client.get("/api/v1/notifications").json()
    assert (preferences["email"], preferences["sends"], preferences["wishes"][0]) == (None, False, all_projects)
    assert apollo in preferences["wishes"]
    for invalid, field in (
        ({"wishes": [all_projects, all_projects]}, "wishes.1.project"),
        ({"wishes": [{**all_projects, "states": ["burnt"]}]}, "wishes.0.states.0"),
        ({"wishes": [{**all_projects, "project": "nobodys"}]}, "project"),
        ({"wishes": [{**all_projects, "project": ""}]}, "wishes.0.project"),
        ({"wishes": [{"states": []}]}, "wishes.0.project"),
        ({}, "wishes"),
    ):
        response = client.put("/api/v1/notifications", invalid, format="json")
        assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field), response.json()
    assert client.get("/api/v1/notifications").json() == preferences
    assert api(owner).put("/api/v1/notifications", {"wishes": [apollo]}, format="json").status_code == 422
    assert len(client.put("/api/v1/notifications", {"wishes": []}, format="json").json()["wishes"]) == len(
        preferences["wishes"]
    )
    assert not MailWish.objects.exists()
    entries = AuditEntry.objects.filter(what="wish for mail").order_by("id").values_list("who", "before", "after")
    choices = {"": ["failed"], "apollo": ["succeeded", "lost"]}
    assert [(who, before, after) for who, before, after in entries] == [("staff", {}, choices), ("staff", choices, {})]
