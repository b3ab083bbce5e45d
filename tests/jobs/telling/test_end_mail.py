"""One mail of one job's end: asked for, taken back, spent once, and gone with the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.message import EmailMessage
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Delivery, EndWish, Job, Membership, Project, Role, Status
from jobs.queue import actions, lifecycle
from jobs.queue.termination import requeue_if_due
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture
def reachable(owner: User, inbox: list[EmailMessage]) -> User:
    User.objects.filter(pk=owner.pk).update(email="owner@people.example")
    owner.refresh_from_db()
    return owner


def told() -> list[tuple[int, str]]:
    return [(each.person_id or 0, json.loads(each.body)["job"]["status"]) for each in Delivery.objects.order_by("id")]


def ends(job: Job, status: Status, attempt: int = 1) -> None:
    for to in (Status.STARTING, Status.RUNNING, status):
        lifecycle.change_status(job.id, attempt, to, "so it went")
    assert Job.objects.get(id=job.id).status == status
    requeue_if_due(job.id, attempt)


def test_one_mail_when_it_has_ended_and_none_of_what_comes_before_or_after(reachable: User, api: Api) -> None:
    job, _ = actions.submit(reachable, GOOD)
    other, _ = actions.submit(reachable, GOOD)
    rest, at = api(reachable), f"/api/v1/jobs/{job.id}/end-mail"
    assert rest.get(at).json() == {"asked": False, "email": "owner@people.example", "sends": True}
    assert [rest.put(at).json()["asked"] for _ in range(2)] == [True, True]
    assert [entry.what for entry in AuditEntry.objects.filter(kind="job", name=job.id)][:1] == ["request email at end"]
    lifecycle.change_status(job.id, 1, Status.STARTING, "placed")
    assert told() == []
    ends(other, Status.FAILED)
    ends(job, Status.FAILED)
    assert told() == [(reachable.pk, "failed")]
    assert rest.get(at).json()["asked"] is False, "it is told once"
    lifecycle.requeue(job.id, "again")
    ends(job, Status.SUCCEEDED, 2)
    assert len(told()) == 1


def test_a_try_of_several_is_no_end(reachable: User, api: Api) -> None:
    job, _ = actions.submit(reachable, {**GOOD, "retry": {"max_attempts": 2}})
    api(reachable).put(f"/api/v1/jobs/{job.id}/end-mail")
    ends(job, Status.FAILED)
    assert (told(), Job.objects.get(id=job.id).attempt) == ([], 2)
    ends(job, Status.LOST, 2)
    assert told() == [(reachable.pk, "lost")]


def test_who_thinks_better_of_it_or_sees_the_job_no_more_hears_nothing(
    reachable: User, stranger: User, api: Api, client: Client
) -> None:
    apollo = Project.objects.create(name="apollo")
    Membership.objects.create(user=reachable, project=apollo, role=Role.SUBMITTER)
    member = Membership.objects.create(user=stranger, project=apollo, role=Role.VIEWER)
    User.objects.filter(pk=stranger.pk).update(email="stranger@people.example")
    job, _ = actions.submit(reachable, {**GOOD, "project": "apollo"})
    client.force_login(reachable)
    assert "Email me when done" in client.get(f"/jobs/{job.id}/").content.decode()
    client.post(f"/jobs/{job.id}/end-mail/")
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "Cancel email" in page
    client.post(f"/jobs/{job.id}/end-mail/", {"forget": ""})
    assert not EndWish.objects.exists()
    assert api(reachable).delete(f"/api/v1/jobs/{job.id}/end-mail").status_code == 204
    assert api(stranger).put(f"/api/v1/jobs/{job.id}/end-mail").status_code == 200
    member.delete()
    assert api(stranger).put(f"/api/v1/jobs/{job.id}/end-mail").status_code == 404
    ends(job, Status.SUCCEEDED)
    assert told() == []


def test_a_wish_goes_with_its_job_and_a_person_s_two_wishes_are_one_mail(reachable: User, api: Api) -> None:
    job, _ = actions.submit(reachable, GOOD)
    gone, _ = actions.submit(reachable, GOOD)
    rest = api(reachable)
    for each in (job, gone):
        rest.put(f"/api/v1/jobs/{each.id}/end-mail")
    Job.objects.get(id=gone.id).delete()
    assert EndWish.objects.count() == 1
    rest.put("/api/v1/notifications", {"wishes": [{"project": None, "states": ["succeeded"]}]}, format="json")
    ends(job, Status.SUCCEEDED)
    assert told() == [(reachable.pk, "succeeded")]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("ended", "The job has already ended: it was cancelled."),
        ("no server", "This board cannot send emails, because it has no mail server."),
        ("no address", "Your account has no mail address."),
    ],
)
def test_where_no_mail_can_come_it_is_said(
    case: str, words: str, reachable: User, api: Api, client: Client, settings: Any
) -> None:
    job, _ = actions.submit(reachable, GOOD)
    if case == "ended":
        actions.cancel(job, "owner")
    elif case == "no server":
        settings.EMAIL_HOST = ""
    else:
        User.objects.filter(pk=reachable.pk).update(email="")
        reachable.refresh_from_db()
    refused = api(reachable).put(f"/api/v1/jobs/{job.id}/end-mail")
    assert (refused.status_code, refused.json()["errors"][0]["message"]) == (409, words)
    client.force_login(reachable)
    assert words in client.post(f"/jobs/{job.id}/end-mail/", follow=True).content.decode()
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert ("Your account has no email address" in page) == (case == "no address")
    if case == "no address":
        assert f'href="/projects/default/webhooks/?job={job.id}"' in page
        assert f'value="{job.id}"' in client.get(f"/projects/default/webhooks/?job={job.id}").content.decode()
    assert not EndWish.objects.exists()
