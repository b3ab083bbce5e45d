"""Lists page by page by cursor, and answers that are told once: ETags."""

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


def following(answer: Any) -> str:
    return str(answer.headers.get("Link", "")).removeprefix("<").partition(">")[0]


def test_what_comes_or_goes_meanwhile_moves_no_page(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """By offset, a new job would show one of the first page again, and a deleted one hide one."""
    make_jobs(9)
    client, seen = api(owner), []
    wanted = list(Job.objects.order_by("-created", "-id").values_list("id", flat=True))
    address = "/api/v1/jobs?limit=3"
    for number in range(3):
        answer = client.get(address)
        assert answer.status_code == 200, answer.content
        seen += [job["id"] for job in answer.json()]
        address = following(answer)
        actions.submit(owner, {**GOOD, "name": f"new {number}"})
        Job.objects.filter(id=seen[0]).delete()
    assert seen == wanted
    assert address == "", "that was the last"


def test_several_states_page_by_page_and_told_once(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """Commas between; the cursor keeps them, and an ETag is of what they find."""
    for status in ("failed", "lost", "running", "queued"):
        make_jobs(2, status=status)
    client, seen = api(owner), []
    address = "/api/v1/jobs?status=lost,failed&limit=3"
    while address:
        answer = client.get(address)
        seen += [job["status"] for job in answer.json()]
        address = following(answer)
    assert seen == ["lost", "lost", "failed", "failed"]
    assert {job["status"] for job in client.get("/api/v1/jobs?status=active").json()} == {"running", "queued"}
    tag = client.get("/api/v1/jobs?status=failed,lost").headers.get("ETag")
    if tag is not None:
        again = client.get("/api/v1/jobs?status=failed,lost", headers={"If-None-Match": tag})
        assert again.status_code == 304
        assert client.get("/api/v1/jobs?status=failed", headers={"If-None-Match": tag}).status_code == 200
    for wrong, told in (("burnt", "burnt"), ("failed,burnt", "burnt"), ("failed,", ""), ("FAILED", "FAILED")):
        refused = client.get(f"/api/v1/jobs?status={wrong}")
        assert refused.status_code == 400
        (error,) = refused.json()["errors"]
        assert error["field"] == "status"
        assert "one or more of queued, starting," in error["message"]
        assert error["message"].startswith(f"The value '{told}' is unknown. ")


def test_a_line_says_what_the_job_itself_says(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    """A list reads fewer columns of a row than the job's own answer does."""
    tagged, old, plain = make_jobs(3)
    JobTag.objects.bulk_create(JobTag(job=tagged, name=name) for name in ("nightly", "baseline"))
    before_cp = {name: size for name, size in {**plain.spec["layout"], "dp": 4}.items() if name != "cp"}
    Job.objects.filter(id=old.id).update(spec={**plain.spec, "layout": before_cp})
    client = api(owner)
    lines = client.get("/api/v1/jobs").json()
    whole = {job.id: client.get(f"/api/v1/jobs/{job.id}").json() for job in (tagged, old, plain)}
    assert lines == [{name: whole[line["id"]][name] for name in line} for line in lines]
    said = {line["id"]: (line["tags"], line["world_size"]) for line in lines}
    ranks = plain.world_size
    assert said == {
        tagged.id: (["baseline", "nightly"], ranks),
        old.id: ([], 4 * ranks // plain.spec["layout"]["dp"]),
        plain.id: ([], ranks),
    }


def test_jobs_of_one_moment_are_each_on_one_page(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    made = make_jobs(5)
    Job.objects.update(created=made[0].created)
    seen: list[str] = []
    address = "/api/v1/jobs?limit=2"
    while address:
        answer = api(owner).get(address)
        seen += [job["id"] for job in answer.json()]
        address = following(answer)
    assert sorted(seen) == sorted(job.id for job in made)


@pytest.mark.parametrize("cursor", ["", "x", "²", "!", "eA", "MjAyNi0wMS0wMSBh", "A" * 201, "AAAA"])
def test_a_cursor_that_is_none_is_named(owner: User, api: Api, cursor: str) -> None:
    """ "MjAyNi0wMS0wMSBh" is a day without a zone."""
    answer = api(owner).get("/api/v1/jobs", {"cursor": cursor})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, "cursor")


def test_a_cursor_and_an_offset_are_not_both_taken(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    make_jobs(3)
    address = following(api(owner).get("/api/v1/jobs?limit=1"))
    answer = api(owner).get(address + "&offset=1")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, "offset")


def test_what_did_not_change_is_304_and_what_did_is_told(owner: User, stranger: User, api: Api) -> None:
    client = api(owner)
    job, _ = actions.submit(owner, GOOD)
    for path in ("/api/v1/jobs", f"/api/v1/jobs/{job.id}"):
        first = client.get(path)
        tag = first.headers["ETag"]
        for told in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
            again = client.get(path, headers={"If-None-Match": told})
            assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        assert "private" in first.headers["Cache-Control"]
        Job.objects.filter(id=job.id).update(priority=job.priority + 1)
        job.refresh_from_db()
        changed = client.get(path, headers={"If-None-Match": tag})
        assert (changed.status_code, changed.headers["ETag"] != tag) == (200, True)
    mine = client.get(f"/api/v1/jobs/{job.id}").headers["ETag"]
    theirs = api(stranger).get(f"/api/v1/jobs/{job.id}", headers={"If-None-Match": mine})
    assert theirs.status_code == 404, "a tag opens no door"


def page_by_page(client: APIClient, address: str) -> list[dict[str, Any]]:
    found = []
    while address:
        answer = client.get(address)
        assert answer.status_code == 200, answer.content
        assert len(answer.json()) <= 3
        found += answer.json()
        address = following(answer)
    return found


def test_projects_members_tokens_and_hosts_come_page_by_page(
    owner: User, api: Api, make_host: Callable[..., Host]
) -> None:
    User.objects.filter(pk=owner.pk).update(is_staff=True)
    owner.refresh_from_db()
    made = [Project.objects.create(name=f"team-{n}") for n in range(7)]
    for name in ("zoë", "ann", "研究", "ben", "a@b.org"):
        Membership.objects.create(project=made[0], user=User.objects.create_user(name), role=Role.VIEWER)
    for n in range(7):
        tokens.create_token(owner, tokens.ApiTokenRequest(name=f"ci-{n}", scopes=["read"]))
    AuthToken.objects.filter(user=owner).update(created=timezone.now())  # no order but their keys'
    for name in ("b", "a", "Ö", "gpu-7", "gpu-10"):
        make_host(name=name)
    client = api(owner)
    lists = ("projects", "name"), ("projects/team-0/members", "user"), ("tokens", "key"), ("hosts", "name")
    for path, key in lists:
        whole = client.get(f"/api/v1/{path}")
        assert following(whole) == "", "few come at once, as ever"
        keys = [one[key] for one in whole.json()]
        assert len(keys) > 4
        assert [one[key] for one in page_by_page(client, f"/api/v1/{path}?limit=3")] == keys
        forged = urlsafe_b64encode(b'["x", "y"]').decode().rstrip("=")
        for wrong in ("limit=0", "limit=1001", "cursor=x", "cursor=", f"cursor={forged}"):
            answer = client.get(f"/api/v1/{path}?{wrong}")
            assert answer.status_code == 400, (path, wrong)
            assert answer.json()["errors"][0]["field"] == wrong.partition("=")[0]
    early = "0001-01-01T00:00:00+23:59"  # no year in UTC
    for path, place in (("jobs", f"{early} x"), ("tokens", f'["{early}", "x"]')):
        forged = urlsafe_b64encode(place.encode()).decode().rstrip("=")
        assert client.get(f"/api/v1/{path}?cursor={forged}").status_code == 400, path
