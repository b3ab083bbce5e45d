"""Pagination of lists by cursor, and conditional requests with ETags."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from knox.models import AuthToken
from rest_framework.test import APIClient

from jobs.models import Host, Job, JobTag, Membership, Project, Role
from jobs.people import tokens
from jobs.queue import actions
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


def get_next_link(response: Any) -> str:
    return str(response.headers.get("Link", "")).removeprefix("<").partition(">")[0]


def test_pages_are_stable_while_jobs_change(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """With offsets, new jobs would repeat rows and deleted jobs would hide rows."""
    make_jobs(9)
    client, seen = api(owner), []
    expected = list(Job.objects.order_by("-created", "-id").values_list("id", flat=True))
    address = "/api/v1/jobs?limit=3"
    for number in range(3):
        response = client.get(address)
        assert response.status_code == 200, response.content
        seen += [job["id"] for job in response.json()]
        address = get_next_link(response)
        actions.submit(owner, {**GOOD, "name": f"new {number}"})
        Job.objects.filter(id=seen[0]).delete()
    assert seen == expected
    assert address == "", "the last page has no link"


def test_pages_of_several_states_have_etags(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """A filter with several states works with cursors and ETags."""
    for status in ("failed", "lost", "running", "queued"):
        make_jobs(2, status=status)
    client, seen = api(owner), []
    address = "/api/v1/jobs?status=lost,failed&limit=3"
    while address:
        response = client.get(address)
        seen += [job["status"] for job in response.json()]
        address = get_next_link(response)
    assert seen == ["lost", "lost", "failed", "failed"]
    assert {job["status"] for job in client.get("/api/v1/jobs?status=active").json()} == {"running", "queued"}
    tag = client.get("/api/v1/jobs?status=failed,lost").headers.get("ETag")
    if tag is not None:
        again = client.get("/api/v1/jobs?status=failed,lost", headers={"If-None-Match": tag})
        assert again.status_code == 304
        assert client.get("/api/v1/jobs?status=failed", headers={"If-None-Match": tag}).status_code == 200
    for wrong, value in (("burnt", "burnt"), ("failed,burnt", "burnt"), ("failed,", ""), ("FAILED", "FAILED")):
        refused = client.get(f"/api/v1/jobs?status={wrong}")
        assert refused.status_code == 400
        (error,) = refused.json()["errors"]
        assert error["field"] == "status"
        assert "one or more of queued, starting," in error["message"]
        assert error["message"].startswith(f"The value '{value}' is unknown. ")


def test_list_has_the_fields_of_the_job(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """The list reads fewer columns, but its fields equal those of the job."""
    tagged, old, plain = make_jobs(3)
    JobTag.objects.bulk_create(JobTag(job=tagged, name=name) for name in ("nightly", "baseline"))
    before_cp = {name: size for name, size in {**plain.spec["layout"], "dp": 4}.items() if name != "cp"}
    Job.objects.filter(id=old.id).update(spec={**plain.spec, "layout": before_cp})
    client = api(owner)
    lines = client.get("/api/v1/jobs").json()
    complete = {job.id: client.get(f"/api/v1/jobs/{job.id}").json() for job in (tagged, old, plain)}
    assert lines == [{name: complete[line["id"]][name] for name in line} for line in lines]
    fields = {line["id"]: (line["tags"], line["world_size"]) for line in lines}
    ranks = plain.world_size
    assert fields == {
        tagged.id: (["baseline", "nightly"], ranks),
        old.id: ([], 4 * ranks // plain.spec["layout"]["dp"]),
        plain.id: ([], ranks),
    }


def test_jobs_with_equal_times_appear_once(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    made = make_jobs(5)
    Job.objects.update(created=made[0].created)
    seen: list[str] = []
    address = "/api/v1/jobs?limit=2"
    while address:
        response = api(owner).get(address)
        seen += [job["id"] for job in response.json()]
        address = get_next_link(response)
    assert sorted(seen) == sorted(job.id for job in made)


@pytest.mark.parametrize("cursor", ["", "x", "²", "!", "eA", "MjAyNi0wMS0wMSBh", "A" * 201, "AAAA"])
def test_rejects_invalid_cursors(owner: User, api: Api, cursor: str) -> None:
    """The value "MjAyNi0wMS0wMSBh" is a date without a time zone."""
    response = api(owner).get("/api/v1/jobs", {"cursor": cursor})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, "cursor")


def test_rejects_cursor_with_offset(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    make_jobs(3)
    address = get_next_link(api(owner).get("/api/v1/jobs?limit=1"))
    response = api(owner).get(address + "&offset=1")
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, "offset")


def test_unchanged_responses_are_304(owner: User, stranger: User, api: Api) -> None:
    client = api(owner)
    job, _ = actions.submit(owner, GOOD)
    for path in ("/api/v1/jobs", f"/api/v1/jobs/{job.id}"):
        first = client.get(path)
        tag = first.headers["ETag"]
        for etags in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
            again = client.get(path, headers={"If-None-Match": etags})
            assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        assert "private" in first.headers["Cache-Control"]
        Job.objects.filter(id=job.id).update(priority=job.priority + 1)
        job.refresh_from_db()
        changed = client.get(path, headers={"If-None-Match": tag})
        assert (changed.status_code, changed.headers["ETag"] != tag) == (200, True)
    etag = client.get(f"/api/v1/jobs/{job.id}").headers["ETag"]
    response = api(stranger).get(f"/api/v1/jobs/{job.id}", headers={"If-None-Match": etag})
    assert response.status_code == 404, "an ETag gives no access"


def read_pages(client: APIClient, address: str) -> list[dict[str, Any]]:
    found = []
    while address:
        response = client.get(address)
        assert response.status_code == 200, response.content
        assert len(response.json()) <= 3
        found += response.json()
        address = get_next_link(response)
    return found


def test_other_lists_have_pages(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    User.objects.filter(pk=owner.pk).update(is_staff=True)
    owner.refresh_from_db()
    made = [Project.objects.create(name=f"team-{n}") for n in range(7)]
    for name in ("zoë", "ann", "研究", "ben", "a@b.org"):
        Membership.objects.create(project=made[0], user=User.objects.create_user(name), role=Role.VIEWER)
    for n in range(7):
        tokens.create_token(owner, tokens.ApiTokenRequest(name=f"ci-{n}", scopes=["read"]))
    AuthToken.objects.filter(user=owner).update(created=timezone.now())  # Only the keys define an order.
    for name in ("b", "a", "Ö", "gpu-7", "gpu-10"):
        make_host(name=name)
    client = api(owner)
    lists = ("projects", "name"), ("projects/team-0/members", "user"), ("tokens", "key"), ("hosts", "name")
    for path, key in lists:
        complete = client.get(f"/api/v1/{path}")
        assert get_next_link(complete) == "", "short lists have one page"
        keys = [one[key] for one in complete.json()]
        assert len(keys) > 4
        assert [one[key] for one in read_pages(client, f"/api/v1/{path}?limit=3")] == keys
        forged = urlsafe_b64encode(b'["x", "y"]').decode().rstrip("=")
        for wrong in ("limit=0", "limit=1001", "cursor=x", "cursor=", f"cursor={forged}"):
            response = client.get(f"/api/v1/{path}?{wrong}")
            assert response.status_code == 400, (path, wrong)
            assert response.json()["errors"][0]["field"] == wrong.partition("=")[0]
    early = "0001-01-01T00:00:00+23:59"  # This time is before year 1 in UTC.
    for path, place in (("jobs", f"{early} x"), ("tokens", f'["{early}", "x"]')):
        forged = urlsafe_b64encode(place.encode()).decode().rstrip("=")
        assert client.get(f"/api/v1/{path}?cursor={forged}").status_code == 400, path
