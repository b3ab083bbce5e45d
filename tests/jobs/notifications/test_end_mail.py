"""Requests for one mail at the end of a job."""

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
def owner_with_mail(owner: User, inbox: list[EmailMessage]) -> User:
    User.objects.filter(pk=owner.pk).update(email="owner@people.example")
    owner.refresh_from_db()
    return owner


def list_mails() -> list[tuple[int, str]]:
    return [(each.person_id or 0, json.loads(each.body)["job"]["status"]) for each in Delivery.objects.order_by("id")]


def end_job(job: Job, status: Status, attempt: int = 1) -> None:
    for to in (Status.STARTING, Status.RUNNING, status):
        lifecycle.change_status(job.id, attempt, to, "next status")
    assert Job.objects.get(id=job.id).status == status
    requeue_if_due(job.id, attempt)


def test_sends_one_mail_at_the_end_of_a_job(owner_with_mail: User, api: Api) -> None:
    job, _ = actions.submit(owner_with_mail, GOOD)
    other, _ = actions.submit(owner_with_mail, GOOD)
    client, path = api(owner_with_mail), f"/api/v1/jobs/{job.id}/end-mail"
    assert client.get(path).json() == {"asked": False, "email": "owner@people.example", "sends": True}
    assert [client.put(path).json()["asked"] for _ in range(2)] == [True, True]
    assert [entry.what for entry in AuditEntry.objects.filter(kind="job", name=job.id)][:1] == ["request email at end"]
    lifecycle.change_status(job.id, 1, Status.STARTING, "placed")
    assert list_mails() == []
    end_job(other, Status.FAILED)
    end_job(job, Status.FAILED)
    assert list_mails() == [(owner_with_mail.pk, "failed")]
    assert client.get(path).json()["asked"] is False, "a request is for one mail"
    lifecycle.requeue(job.id, "again")
    end_job(job, Status.SUCCEEDED, 2)
    assert len(list_mails()) == 1


def test_sends_no_mail_while_a_retry_follows(owner_with_mail: User, api: Api) -> None:
    job, _ = actions.submit(owner_with_mail, {**GOOD, "retry": {"max_attempts": 2}})
    api(owner_with_mail).put(f"/api/v1/jobs/{job.id}/end-mail")
    end_job(job, Status.FAILED)
    assert (list_mails(), Job.objects.get(id=job.id).attempt) == ([], 2)
    end_job(job, Status.LOST, 2)
    assert list_mails() == [(owner_with_mail.pk, "lost")]


def test_sends_no_mail_after_withdrawal_or_lost_access(
    owner_with_mail: User, stranger: User, api: Api, client: Client
) -> None:
    apollo = Project.objects.create(name="apollo")
    Membership.objects.create(user=owner_with_mail, project=apollo, role=Role.SUBMITTER)
    member = Membership.objects.create(user=stranger, project=apollo, role=Role.VIEWER)
    User.objects.filter(pk=stranger.pk).update(email="stranger@people.example")
    job, _ = actions.submit(owner_with_mail, {**GOOD, "project": "apollo"})
    client.force_login(owner_with_mail)
    assert "Email me when done" in client.get(f"/jobs/{job.id}/").content.decode()
    client.post(f"/jobs/{job.id}/end-mail/")
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "Cancel email" in page
    client.post(f"/jobs/{job.id}/end-mail/", {"forget": ""})
    assert not EndWish.objects.exists()
    assert api(owner_with_mail).delete(f"/api/v1/jobs/{job.id}/end-mail").status_code == 204
    assert api(stranger).put(f"/api/v1/jobs/{job.id}/end-mail").status_code == 200
    member.delete()
    assert api(stranger).put(f"/api/v1/jobs/{job.id}/end-mail").status_code == 404
    end_job(job, Status.SUCCEEDED)
    assert list_mails() == []


def test_deletes_requests_with_their_job_and_merges_two_mails(owner_with_mail: User, api: Api) -> None:
    job, _ = actions.submit(owner_with_mail, GOOD)
    deleted, _ = actions.submit(owner_with_mail, GOOD)
    client = api(owner_with_mail)
    for each in (job, deleted):
        client.put(f"/api/v1/jobs/{each.id}/end-mail")
    Job.objects.get(id=deleted.id).delete()
    assert EndWish.objects.count() == 1
    client.put("/api/v1/notifications", {"wishes": [{"project": None, "states": ["succeeded"]}]}, format="json")
    end_job(job, Status.SUCCEEDED)
    assert list_mails() == [(owner_with_mail.pk, "succeeded")]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ended", "The job has already ended: it was cancelled."),
        ("no server", "This board cannot send emails, because it has no mail server."),
        ("no address", "Your account has no mail address."),
    ],
)
def test_rejects_a_request_if_no_mail_can_be_sent(
    case: str, message: str, owner_with_mail: User, api: Api, client: Client, settings: Any
) -> None:
    job, _ = actions.submit(owner_with_mail, GOOD)
    if case == "ended":
        actions.cancel(job, "owner")
    elif case == "no server":
        settings.EMAIL_HOST = ""
    else:
        User.objects.filter(pk=owner_with_mail.pk).update(email="")
        owner_with_mail.refresh_from_db()
    response = api(owner_with_mail).put(f"/api/v1/jobs/{job.id}/end-mail")
    assert (response.status_code, response.json()["errors"][0]["message"]) == (409, message)
    client.force_login(owner_with_mail)
    assert message in client.post(f"/jobs/{job.id}/end-mail/", follow=True).content.decode()
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert ("Your account has no email address" in page) == (case == "no address")
    if case == "no address":
        assert f'href="/projects/default/webhooks/?job={job.id}"' in page
        assert f'value="{job.id}"' in client.get(f"/projects/default/webhooks/?job={job.id}").content.decode()
    assert not EndWish.objects.exists()
