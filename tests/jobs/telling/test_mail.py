"""Mails over a real SMTP server: who gets which, and that no text of a user becomes a header."""

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
def postman() -> Iterator[DeliveryWorker]:
    made = DeliveryWorker()
    yield made
    made.close()


def sent(postman: DeliveryWorker) -> None:
    def none_waits() -> bool:
        postman.run_once()
        return not Delivery.objects.filter(due__isnull=False).exists()

    wait_until(none_waits, "every mail was sent", 20)


def wishing(user: User, project: str = "", states: tuple[str, ...] = ("cancelled",), address: str = "") -> None:
    User.objects.filter(pk=user.pk).update(email=address or f"{user.username}@people.example")
    MailWish.objects.create(user=user, project=project, states=list(states))


def test_people_are_mailed_of_the_states_they_chose(
    owner: User, stranger: User, staff: User, inbox: list[EmailMessage], postman: DeliveryWorker
) -> None:
    apollo = Project.objects.create(name="apollo")
    Membership.objects.create(user=owner, project=apollo, role=Role.SUBMITTER)
    wishing(owner)
    wishing(stranger, "apollo", ("queued", "cancelled"))
    wishing(staff, "apollo")
    job, _ = actions.submit(owner, {**GOOD, "project": "apollo"})
    elsewhere, _ = actions.submit(stranger, GOOD)
    for each in (job, elsewhere):
        actions.cancel(each, "owner")
    sent(postman)
    assert sorted(mail["To"] for mail in inbox) == ["owner@people.example", "staff@people.example"]
    mail = next(mail for mail in inbox if mail["To"].startswith("owner"))
    assert mail["From"] == "meshboard@board.example"
    assert mail["Subject"] == f"{job.name} was cancelled"
    assert mail.get_content().startswith(f"{job.name} ({job.id}) was cancelled.")
    assert mail["Auto-Submitted"] == "auto-generated"
    assert f"https://board.example/jobs/{job.id}/" in mail.get_content()
    assert "cancelled by owner" in mail.get_content()
    assert set(Delivery.objects.values_list("outcome", flat=True)) == {Outcome.DELIVERED}


def test_who_left_before_the_mail_did_gets_none(
    owner: User, stranger: User, staff: User, inbox: list[EmailMessage], postman: DeliveryWorker
) -> None:
    apollo = Project.objects.create(name="apollo")
    for user in (owner, stranger):
        Membership.objects.create(user=user, project=apollo, role=Role.SUBMITTER)
    gone = User.objects.create_user("gone", is_active=False)
    wishing(owner)
    wishing(staff, "apollo")
    wishing(stranger, "apollo")
    wishing(gone)
    job, _ = actions.submit(owner, {**GOOD, "project": "apollo"})
    actions.cancel(job, "owner")
    Job.objects.filter(pk=job.pk).update(owner=gone)
    lifecycle.requeue(job.id, "again")
    actions.cancel(Job.objects.get(pk=job.pk), "owner")
    assert not Delivery.objects.filter(person=gone).exists()
    Membership.objects.filter(user=stranger).delete()
    User.objects.filter(pk=staff.pk).update(is_active=False)
    Membership.objects.filter(user=owner).delete()
    sent(postman)
    assert [mail["To"] for mail in inbox] == ["owner@people.example"], "of what was their own"
    left = Delivery.objects.filter(person__in=(stranger, staff))
    assert set(left.values_list("outcome", "due")) == {(Outcome.GIVEN_UP, None)}


@pytest.mark.usefixtures("inbox")
def test_who_has_no_mail_address_is_told_who_gives_them_one(owner: User, client: Client, settings: Any) -> None:
    settings.EMAIL_HOST = "mail.example"
    admin = User.objects.create_superuser("admin", password="admin-password")
    for user, way in (
        (owner, "Only staff can change your email address"),
        (admin, f'href="/admin/auth/user/{admin.pk}/change/"'),
    ):
        client.force_login(user)
        for path in ("/account/", "/notifications/"):
            page = client.get(path).content.decode()
            assert "Your account has no email address" in page
            assert way in page
    User.objects.filter(pk=owner.pk).update(email="owner@people.example")
    client.force_login(owner)
    assert "owner@people.example" in client.get("/account/").content.decode()


def test_every_state_is_told_as_one_says_it() -> None:
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
def test_no_job_s_name_becomes_a_header(
    name: str, owner: User, inbox: list[EmailMessage], postman: DeliveryWorker
) -> None:
    wishing(owner, address="owner@people.example")
    job, _ = actions.submit(owner, GOOD)
    Job.objects.update(name=name)
    lifecycle.change_status(job.id, 1, Status.CANCELLING, "x\r\n.\r\nMAIL FROM:<x@example.org>")
    lifecycle.change_status(job.id, 1, Status.CANCELLED, "y\r\n.\r\nRCPT TO:<everybody@example.org>\r\n")
    sent(postman)
    (mail,) = inbox
    assert mail["Bcc"] is None
    assert mail["X-RcptTo"] == mail["To"] == "owner@people.example"
    assert str(mail["Subject"]).endswith("was cancelled")
    assert len(str(mail["Subject"])) <= 75
    assert "RCPT TO:<everybody@example.org>" in mail.get_content()


def test_while_the_mail_server_is_away_mails_wait(
    owner: User, inbox: list[EmailMessage], postman: DeliveryWorker, settings: Any
) -> None:
    wishing(owner)
    there, settings.EMAIL_PORT = settings.EMAIL_PORT, find_free_port()
    actions.cancel(actions.submit(owner, GOOD)[0], "owner")
    wait_until(lambda: postman.run_once() or Delivery.objects.get().tries, "it was tried")
    assert Delivery.objects.get().outcome == Outcome.WAITING
    assert "ConnectionRefusedError" in Delivery.objects.get().tries[0]["words"]
    settings.EMAIL_PORT = there
    Delivery.objects.update(due=Delivery.objects.get().created)
    sent(postman)
    assert len(inbox) == 1


def test_no_more_than_an_hour_s_mails_and_none_without_a_server_or_an_address(
    owner: User, stranger: User, inbox: list[EmailMessage], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_MAILS_PER_HOUR", 2)
    wishing(owner, states=("queued",))
    wishing(stranger, states=("queued",))
    User.objects.filter(pk=stranger.pk).update(email="")
    for _ in range(3):
        actions.submit(owner, GOOD)
        actions.submit(stranger, GOOD)
    assert list(Delivery.objects.values_list("person", flat=True)) == [owner.pk, owner.pk]
    Delivery.objects.all().delete()
    settings.EMAIL_HOST = ""
    actions.submit(owner, GOOD)
    assert not Delivery.objects.exists()


def test_the_page_keeps_what_was_chosen(owner: User, staff: User, client: Client, settings: Any) -> None:
    settings.EMAIL_HOST = "mail.example"
    Project.objects.create(name="apollo")
    client.force_login(staff)
    shown = {"shown": ["", "default", "apollo"]}
    chosen = {"project:": ["failed", "lost"], "project:apollo": ["succeeded"], **shown}
    client.post("/notifications/", chosen)
    assert dict(MailWish.objects.filter(user=staff).values_list("project", "states")) == {
        "": ["failed", "lost"],
        "apollo": ["succeeded"],
    }
    assert client.get("/notifications/").content.decode().count(" checked") == 3
    for senseless in ({"project:": ["burnt"]}, {"project:nobodys": ["failed"]}):
        assert "does not exist." in client.post("/notifications/", senseless, follow=True).content.decode()
    assert MailWish.objects.filter(user=staff).count() == 2
    client.post("/notifications/", shown)
    assert not MailWish.objects.filter(user=staff).exists()
    client.force_login(owner)
    assert "apollo" not in client.get("/notifications/").content.decode()


def test_a_board_without_a_mail_server_shows_no_boxes(owner: User, client: Client, settings: Any) -> None:
    client.force_login(owner)
    for host, boxes in (("mail.example", True), ("", False)):
        settings.EMAIL_HOST = host
        page = client.get("/notifications/").content.decode()
        assert ('type="checkbox"' in page, "this board has no mail server" in page) == (boxes, not boxes)


def test_who_has_two_hundred_projects_chooses_of_each_and_finds_it_by_name(owner: User, client: Client) -> None:
    """A page of them at a time: to save one leaves the choices of the others."""
    Project.objects.get_or_create(name=DEFAULT_PROJECT)  # which a test that empties tables may have taken
    projects = Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(200))
    Membership.objects.bulk_create(Membership(user=owner, project=one, role=Role.VIEWER) for one in projects)
    client.force_login(owner)
    first = client.get("/notifications/")
    assert "1 to 20 of 201" in first.content.decode()
    assert "mission-150" not in first.content.decode()
    found = client.get("/notifications/?q=mission-15")
    assert [wish.project for wish in found.context["wishes"]] == ["", *(f"mission-{n}" for n in range(150, 160))]
    shown = ["", *(f"mission-{n}" for n in range(150, 160))]
    kept = client.post("/notifications/?q=mission-15", {"project:mission-155": ["failed"], "shown": shown})
    assert kept.headers["Location"] == "/notifications/?q=mission-15"
    assert [wish.project for wish in client.get("/notifications/").context["wishes"]][:2] == ["", "mission-155"]
    client.post("/notifications/", {"project:": ["lost"], "shown": ["", "default", "mission-000"]})
    assert dict(MailWish.objects.values_list("project", "states")) == {"": ["lost"], "mission-155": ["failed"]}
    Membership.objects.filter(project__name="mission-155").delete()
    client.post("/notifications/", {"shown": ["", "default"]})
    assert not MailWish.objects.exists(), "who left a project has no wish for it"


def test_rest_keeps_what_was_chosen(owner: User, staff: User, api: Callable[[User], APIClient]) -> None:
    """By the page's rule: another's project is as one that is not there; what is refused changes nothing."""
    Project.objects.create(name="apollo")
    own, of_apollo = {"project": None, "states": ["failed"]}, {"project": "apollo", "states": ["succeeded", "lost"]}
    rest = api(staff)
    told = rest.put("/api/v1/notifications", {"wishes": [own, of_apollo]}, format="json").json()
    assert told == rest.get("/api/v1/notifications").json()
    assert (told["email"], told["sends"], told["wishes"][0]) == (None, False, own)
    assert of_apollo in told["wishes"]
    for senseless, field in (
        ({"wishes": [own, own]}, "wishes.1.project"),
        ({"wishes": [{**own, "states": ["burnt"]}]}, "wishes.0.states.0"),
        ({"wishes": [{**own, "project": "nobodys"}]}, "project"),
        ({"wishes": [{**own, "project": ""}]}, "wishes.0.project"),
        ({"wishes": [{"states": []}]}, "wishes.0.project"),
        ({}, "wishes"),
    ):
        refused = rest.put("/api/v1/notifications", senseless, format="json")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field), refused.json()
    assert rest.get("/api/v1/notifications").json() == told
    assert api(owner).put("/api/v1/notifications", {"wishes": [of_apollo]}, format="json").status_code == 422
    assert len(rest.put("/api/v1/notifications", {"wishes": []}, format="json").json()["wishes"]) == len(told["wishes"])
    assert not MailWish.objects.exists()
    entries = AuditEntry.objects.filter(what="wish for mail").order_by("id").values_list("who", "before", "after")
    kept = {"": ["failed"], "apollo": ["succeeded", "lost"]}
    assert [(who, before, after) for who, before, after in entries] == [("staff", {}, kept), ("staff", kept, {})]
