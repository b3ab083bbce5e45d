"""Tags, the archive, and bulk actions on pages and over REST, with permissions and races."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Job, JobTag, Status
from jobs.queue import actions, bulk_actions, lifecycle
from planner.facts.validation import SpecError
from tests.jobs.pages.test_listing import names
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
Make = Callable[..., list[Job]]


def tags(job: Job) -> list[str]:
    return [tag.name for tag in job.tags.all()]


def act(client: Client, action: str, *jobs: Job, **more: str) -> Any:
    return client.post("/jobs/act/", {"action": action, "job": [job.id for job in jobs], **more}, follow=True)


def test_adds_removes_and_filters_by_tags(make_jobs: Make, owner: User, client: Client) -> None:
    first, second = make_jobs(2)
    client.force_login(owner)
    page = act(client, "tag", first, second, tags="ci, night run ,ci").content.decode()
    assert tags(first) == tags(second) == ["ci", "night run"]
    assert "2 of 2 jobs tagged." in page
    assert 'href="/?tag=night+run"' in page
    act(client, "untag", second, tags="ci")
    assert names(client, "?tag=ci") == [first.name]
    assert names(client, "?tag=absent") == []
    assert "Write" not in act(client, "tag", first, tags=" , ").content.decode()
    assert tags(first) == ["ci", "night run"]


def test_undoes_an_action(make_jobs: Make, owner: User, client: Client) -> None:
    tagged, archived = make_jobs(2, status=Status.FAILED)
    client.force_login(owner)
    for action, job, back in (("archive", archived, "restore"), ("tag", tagged, "untag")):
        page = act(client, action, job, tags="ci").content.decode()
        assert f'name="action" value="{back}" data-key="u"' in page
        act(client, back, job, tags="ci")
        assert 'value="restore" data-key="u"' not in client.get("/").content.decode() or action == "tag"
    archived.refresh_from_db()
    assert not archived.archived
    assert tags(tagged) == []


def test_list_hides_archived_jobs(
    make_jobs: Make,
    owner: User,
    client: Client,
    api: Api,
) -> None:
    (gone,) = make_jobs(1, name="gone", status=Status.FAILED)
    (stays,) = make_jobs(1, name="stays", status=Status.RUNNING)
    client.force_login(owner)
    assert (
        "1 of 2 jobs archived." in act(client, "archive", gone, stays).content.decode()
    )  # Running jobs are not archived.
    assert names(client, "") == ["stays"]
    assert names(client, "?archived=only") == ["gone"]
    assert set(names(client, "?archived=too")) == {"gone", "stays"}
    assert "Include archived jobs" in client.get("/?q=gone").content.decode()
    assert [job["id"] for job in api(owner).get("/api/v1/jobs").json()] == [stays.id]
    assert [job["id"] for job in api(owner).get("/api/v1/jobs?archived=only").json()] == [gone.id]
    assert lifecycle.requeue(gone.id, "again")
    assert names(client, "?status=queued") == ["gone"]


def test_counts_respect_the_other_filters(make_jobs: Make, owner: User, client: Client) -> None:
    make_jobs(2, status=Status.FAILED)
    make_jobs(3, status=Status.RUNNING, name="needle")
    make_jobs(1, status=Status.FAILED, archived=True)
    client.force_login(owner)
    page = client.get("/?status=failed")
    assert dict(page.context["counts"]) == {"running": 3, "failed": 2}
    assert (page.context["total"], page.context["page"].paginator.count) == (5, 2)
    assert 'href="/?status=running"' in page.content.decode()
    assert dict(client.get("/?q=needle").context["counts"]) == {"running": 3}


def test_address_selects_the_columns(make_jobs: Make, owner: User, staff: User, client: Client) -> None:
    make_jobs(1)
    client.force_login(owner)
    page = client.get("/?col=project&col=slots&col=nonsense&col=owner").content.decode()
    assert '<th scope="col">Project</th>' in page
    assert '<th scope="col">Layout</th>' not in page
    assert '<th scope="col">Owner</th>' not in page, "whose jobs they are is staff's to ask"
    client.force_login(staff)
    assert '<th scope="col">Owner</th>' in client.get("/?col=owner").content.decode()


def test_columns_need_no_query_per_row(
    make_jobs: Make,
    owner: User,
    client: Client,
    django_assert_num_queries: Any,
) -> None:
    made = make_jobs(30, status=Status.SUCCEEDED)
    JobTag.objects.bulk_create(JobTag(job=job, name=name) for job in made for name in ("a", "b"))
    client.force_login(owner)
    # Session, user, its projects three times, those by name, counts, page, its tags, its attempts, their changes.
    with django_assert_num_queries(11):
        client.get("/")
    with django_assert_num_queries(10):
        client.get("/?col=speed&col=ended&col=status&tag=a")
    with django_assert_num_queries(9):
        client.get("/?col=owner&col=layout")


def test_cancels_several_jobs_after_confirmation(owner: User, staff: User, client: Client) -> None:
    jobs = [actions.submit(owner, GOOD)[0] for _ in range(3)]
    ended = jobs.pop()
    actions.cancel(ended, "owner")
    client.force_login(owner)
    asked = act(client, "cancel", *jobs, ended, back="status=queued&part=rows")
    assert "Cancel 2 jobs?" in asked.content.decode()
    assert Job.objects.filter(status=Status.QUEUED).count() == 2
    done = act(client, "cancel", *jobs, confirmed="1", back="status=queued&part=rows")
    assert done.redirect_chain == [("/?status=queued", 302)]
    assert Job.objects.filter(status=Status.CANCELLED).count() == 3


@pytest.mark.parametrize(
    "form",
    [
        {"action": "archive"},
        {"action": "archive", "job": "no such job"},
        {"action": "nonsense", "job": "aaaaaaaaaa"},
        {"action": "tag", "job": "aaaaaaaaaa", "tags": "x" * 51},
        {"action": "tag", "job": "aaaaaaaaaa", "tags": "a\x00b"},
    ],
)
def test_rejects_an_invalid_action(owner: User, client: Client, form: dict[str, str]) -> None:
    client.force_login(owner)
    page = client.post("/jobs/act/", form, follow=True)
    assert page.status_code == 200
    assert 'data-tone="bad"' in page.content.decode()
    assert not JobTag.objects.exists()


def test_users_cannot_change_foreign_jobs(
    owner: User, stranger: User, viewer: User, staff: User, client: Client, api: Api
) -> None:
    job, _ = actions.submit(owner, GOOD)
    for user in (stranger, viewer):
        client.force_login(user)
        for action in ("tag", "untag", "archive", "cancel"):
            act(client, action, job, tags="mine", confirmed="1")
            told = api(user).post(
                "/api/v1/jobs/actions", {"action": action, "jobs": [job.id], "tags": ["mine"]}, "json"
            )
            assert told.json()["changed"] == []
        assert api(user).patch(f"/api/v1/jobs/{job.id}", {"add_tags": ["mine"]}, "json").status_code in (403, 404)
    job.refresh_from_db()
    assert (tags(job), job.status, job.archived) == ([], Status.QUEUED, False)
    told = api(staff).post("/api/v1/jobs/actions", {"action": "tag", "jobs": [job.id], "tags": ["checked"]}, "json")
    assert told.json() == {"changed": [job.id], "unchanged": []}
    assert AuditEntry.objects.get(what="tag").who == "staff"


def test_bulk_change_is_atomic(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    answer = api(owner).patch(f"/api/v1/jobs/{job.id}", {"tags": ["a"], "tag": "a"}, "json")
    told = {error["field"]: error["message"] for error in answer.json()["errors"]}
    assert (answer.status_code, told["tags"]) == (422, "`tags` is read-only. Use `add_tags` and `remove_tags`.")
    assert told["tag"] == "`tag` is not a known field. Remove it. Fields: archived, add_tags, remove_tags."
    answer = api(owner).patch(f"/api/v1/jobs/{job.id}", {"add_tags": ["a"], "archived": True}, "json")
    assert answer.status_code == 409
    assert tags(job) == []
    bulk_actions.tag([job.id], [f"tag {number}" for number in range(bulk_actions.MAX_TAGS)], "owner")
    swapped = {"remove_tags": ["tag 0"], "add_tags": ["one more"]}
    assert api(owner).patch(f"/api/v1/jobs/{job.id}", swapped, "json").status_code == 200
    refused = api(owner).patch(f"/api/v1/jobs/{job.id}", {"add_tags": ["too many"]}, "json")
    assert refused.status_code == 422
    assert "20 tags, and 1 more tags would exceed the maximum of 20" in refused.content.decode()


@pytest.mark.django_db(transaction=True)
def test_concurrent_tags_stay_within_the_limit(postgres: None) -> None:
    """Each request adds 15 of the 20 allowed tags, so one is rejected and no tag is stored twice."""
    user = User.objects.create_user("owner", password="owner-password")
    job, _ = actions.submit(user, GOOD)
    both = threading.Barrier(2)
    refused: list[str] = []

    def tag(kind: str) -> None:
        both.wait()
        try:
            bulk_actions.tag([job.id], [f"{kind} {number}" for number in range(15)], kind)
        except SpecError as error:
            refused.append(error.problems[0].message)
        finally:
            connection.close()

    threads = [threading.Thread(target=tag, args=(kind,)) for kind in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert JobTag.objects.filter(job=job).count() == 15


def test_rest_lists_unchanged_jobs_with_reasons(make_jobs: Make, owner: User, stranger: User, api: Api) -> None:
    live, ended = make_jobs(1)[0], make_jobs(1, status=Status.FAILED)[0]
    theirs, _ = actions.submit(stranger, GOOD)
    ids = [live.id, ended.id, theirs.id, "nobodys"]
    told = api(owner).post("/api/v1/jobs/actions", {"action": "archive", "jobs": ids}, format="json").json()
    assert told["changed"] == [ended.id]
    assert {row["job"]: row["reason"] for row in told["unchanged"]} == {
        live.id: "The job cannot be archived because it is queued.",
        theirs.id: "The job does not exist, or you cannot change it.",
        "nobodys": "The job does not exist, or you cannot change it.",
    }
    again = api(owner).post("/api/v1/jobs/actions", {"action": "archive", "jobs": [ended.id]}, format="json").json()
    assert again["unchanged"] == [
        {"job": ended.id, "reason": "The action changes nothing, because the job already has the requested state."}
    ]
