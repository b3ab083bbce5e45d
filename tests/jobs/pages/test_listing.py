"""The job list: pages, filters, queries, and the list without Redis."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from rest_framework.test import APIClient

from contracts.names import telemetry_stream
from jobs.models import Attempt, Job, JobTag, Membership, Project, Role, Status
from jobs.pages.jobs import listing as pages
from jobs.pages.jobs import live_figures
from jobs.queue import actions
from tests.jobs.api.job_events import make_step_item
from tests.jobs.metrics.board import send_step, send_traffic

Make = Callable[..., list[Job]]
SCRIPT = {"kind": "script", "name": "a script", "layout": {"dp": 2}, "script": {"path": "x.py"}}


@pytest.fixture(autouse=True)
def _nothing_read_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    live_figures.progress_cache.clear()


def names(client: Client, query: str) -> list[str]:
    return [row["name"] for row in client.get(f"/{query}").context["rows"]]


def test_list_pages_contain_every_job(make_jobs: Make, owner: User, client: Client) -> None:
    make_jobs(2 * pages.JOBS_PER_PAGE + 1)
    client.force_login(owner)
    seen = [name for page in (1, 2, 3) for name in names(client, f"?page={page}")]
    assert len(seen) == len(set(seen)) == 2 * pages.JOBS_PER_PAGE + 1
    first = client.get("/?status=queued").content.decode()
    assert "1 to 50 of 101" in first
    assert 'href="/?status=queued&amp;page=2"' in first
    assert 'hx-get="/?status=queued&amp;part=rows"' in first
    assert 'rel="prev"' not in first
    rows = client.get("/?status=queued&part=rows&page=3").content.decode()
    assert 'href="/?status=queued&amp;page=2"' in rows
    assert "<form" not in rows


@pytest.mark.parametrize("page", ["0", "-1", "x", "²", "9" * 5000, "\x00", "999999"])
def test_invalid_page_number_shows_a_page(make_jobs: Make, owner: User, client: Client, page: str) -> None:
    make_jobs(1)
    client.force_login(owner)
    answer = client.get("/", {"page": page})
    assert answer.status_code == 200
    assert len(answer.context["rows"]) == 1


def test_filters_by_state_kind_text_and_owner(make_jobs: Make, owner: User, staff: User, client: Client) -> None:
    (mine,) = make_jobs(1, name="needle in hay")
    make_jobs(1, name="ended", status=Status.FAILED)
    make_jobs(1, name="theirs", owner=staff)
    actions.submit(owner, SCRIPT)
    client.force_login(owner)
    assert names(client, "?status=failed") == ["ended"]
    assert names(client, "?kind=script") == ["a script"]
    assert names(client, "?q=NEEDLE") == names(client, f"?q={mine.id}") == ["needle in hay"]
    assert "theirs" not in names(client, "?owner=staff")  # a filter that the user may not set changes nothing
    client.force_login(staff)
    assert names(client, "?owner=staff") == ["theirs"]
    assert names(client, "?q=needle&status=failed") == []
    assert "No matching jobs" in client.get("/?q=absent").content.decode()


def test_filters_by_several_states(make_jobs: Make, owner: User, client: Client) -> None:
    """States are separated by commas or sent by several boxes. `active` means all states before the end."""
    for status in (Status.QUEUED, Status.RUNNING, Status.UNREACHABLE, Status.FAILED, Status.LOST):
        make_jobs(1, name=status, status=status)
    client.force_login(owner)
    assert sorted(names(client, "?status=failed,lost")) == ["failed", "lost"]
    assert sorted(names(client, "?status=failed&status=lost")) == ["failed", "lost"]
    assert sorted(names(client, "?status=active")) == ["queued", "running", "unreachable"]
    assert sorted(names(client, "?status=active,lost")) == ["lost", "queued", "running", "unreachable"]
    assert len(names(client, "?status=")) == 5
    page = client.get("/?status=failed&status=lost")
    assert page.context["page"].paginator.count == 2
    shown = page.content.decode()
    assert 'href="/?status=active"' in shown
    assert shown.count("checked> failed") == shown.count("checked> lost") == 1
    refused = client.get("/?status=failed,burnt").content.decode()
    words = "Use one or more of queued, starting, running, unreachable, cancelling, succeeded, failed, lost, cancelled"
    assert f"{words}, active (all jobs that have not ended)." in refused


def test_filters_by_any_kind_and_all_tags(
    make_jobs: Make, owner: User, client: Client, api: Callable[[User | None], APIClient]
) -> None:
    actions.submit(owner, SCRIPT)
    for name, tags in (("both", ("ci", "nightly")), ("ci", ("ci",)), ("comma", ("ci,nightly",)), ("none", ())):
        (job,) = make_jobs(1, name=name)
        JobTag.objects.bulk_create(JobTag(job=job, name=tag) for tag in tags)
    client.force_login(owner)
    wanted = {
        "kind=script,lab": ["a script"],
        "kind=script,train": ["a script", "both", "ci", "comma", "none"],
        "tag=ci": ["both", "ci"],
        "tag=nightly,%20ci,": ["both"],
        "tag=ci,nightly": ["both", "comma"],
        "tag=ci,absent": [],
        "kind=train&tag=ci&status=queued": ["both", "ci"],
    }
    for query, found in wanted.items():
        assert sorted(names(client, f"?{query}")) == found, query
        assert sorted(job["name"] for job in api(owner).get(f"/api/v1/jobs?{query}").json()) == found, query
    assert names(client, "?kind=lab&kind=script") == ["a script"]
    assert names(client, "?tag=nightly&tag=ci")[-1] == "both"
    shown = client.get("/?kind=script&tag=ci&tag=nightly").content.decode()
    assert 'value="ci,nightly"' in shown
    assert re.findall(r'name="kind" value="(\w+)" checked', shown) == ["script"]


def test_many_projects_are_filtered_by_text(owner: User, client: Client) -> None:
    projects = Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(200))
    Membership.objects.bulk_create(
        Membership(user=owner, project=one, role=Role.SUBMITTER if n % 2 else Role.VIEWER)
        for n, one in enumerate(projects)
    )
    actions.submit(owner, SCRIPT)
    client.force_login(owner)
    page = client.get("/").content.decode()
    assert '<option value="mission-150">' in page.partition('<datalist id="projects">')[2]
    assert 'list="projects"' in page
    form = client.get("/jobs/script/").content.decode()
    assert 'list="l-project"' in form
    assert "mission-151" in form
    assert "mission-150" not in form, "a viewer submits nothing to it"
    assert "mission-151" in client.get("/jobs/new/").content.decode()
    shown = client.get("/find/?q=mission-15").json()
    assert shown["projects"][0] == {"name": "mission-150", "url": "/projects/mission-150/"}
    assert len(shown["projects"]) == 8


def test_filters_by_project_with_several_projects(make_jobs: Make, owner: User, client: Client) -> None:
    make_jobs(1, name="alone")
    client.force_login(owner)
    assert 'name="project"' not in client.get("/").content.decode(), "there is only default"
    team = Project.objects.create(name="team")
    Project.objects.create(name="theirs")
    Membership.objects.create(project=team, user=owner, role=Role.VIEWER)
    stranger = User.objects.create_user("stranger", password="stranger-password")
    make_jobs(1, name="of the team", project="team", owner=stranger)
    make_jobs(1, name="hidden", project="theirs", owner=stranger)
    page = client.get("/projects/team/").content.decode()
    assert 'href="/?project=team"' in page
    page = client.get("/?project=team").content.decode()
    assert '<option value="team" selected>' in page
    assert '<option value="default">' in page
    assert "theirs" not in page
    assert names(client, "?project=team") == ["of the team"]
    assert names(client, "?project=default") == ["alone"]
    assert names(client, "?project=theirs") == [], "as one that is not there"


def test_invalid_filter_shows_an_error(make_jobs: Make, owner: User, client: Client) -> None:
    make_jobs(1)
    client.force_login(owner)
    for query in ({"status": "happy"}, {"q": "a\x00b"}, {"q": "x" * 101}, {"kind": "\x00"}):
        answer = client.get("/", query)
        assert answer.status_code == 200
        assert 'class="problem"' in answer.content.decode()


def test_empty_list_has_no_filters(owner: User, client: Client) -> None:
    client.force_login(owner)
    page = client.get("/").content.decode()
    assert "No jobs yet" in page
    assert 'class="filters"' not in page


@pytest.mark.parametrize(
    ("slots", "layout"), [(4, {"dp": 2, "tp": 2, "zero": 1}), (2, {"dp": 2, "tp": 1, "zero": 1})], ids=["four", "two"]
)
def test_empty_list_submits_a_sample_run(
    slots: int, layout: dict[str, int], owner: User, make_host: Any, client: Client
) -> None:
    make_host(slots=slots)
    client.force_login(owner)
    page = client.get("/").content.decode()
    assert 'form="sample"' in page
    (fields,) = re.findall(r'<form id="sample".*?</form>', page, re.DOTALL)
    sent = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', fields)}
    assert client.post("/jobs/new/", sent).status_code == 302
    assert client.post("/jobs/new/", sent).status_code == 302
    job = Job.objects.get()
    assert layout.items() <= job.spec["layout"].items()
    train = job.spec["train"]
    assert (train["steps"], train["global_batch"], train["micro_batches"], train["seq_len"]) == (80, 16, 2, 128)
    assert 'form="sample"' not in client.get("/").content.decode()


def test_number_of_queries_does_not_depend_on_jobs(make_jobs: Make, owner: User, client: Client) -> None:
    client.force_login(owner)
    make_jobs(1, status=Status.SUCCEEDED)
    with CaptureQueriesContext(
        connection,
    ) as one:
        client.get("/")
    make_jobs(49, status=Status.SUCCEEDED)
    with CaptureQueriesContext(connection) as fifty:
        client.get("/")
    assert len(fifty) == len(one)
    assert not any('"jobs_job"."estimate"' in query["sql"] for query in fifty)


def test_admin_list_has_a_constant_number_of_queries(make_jobs: Make, client: Client, db: None) -> None:
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    make_jobs(1)
    with CaptureQueriesContext(connection) as one:
        client.get("/admin/jobs/job/")
    make_jobs(60)
    with CaptureQueriesContext(connection) as many:
        page = client.get("/admin/jobs/job/").content.decode()
    assert len(many) == len(one)
    assert not any('"jobs_job"."estimate"' in query["sql"] for query in many)
    assert page.count('name="form-') < 120


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL goes by the table's size, and sorts this one")
def test_project_list_uses_an_index(make_jobs: Make, staff: User) -> None:
    plan = pages.get_listable_jobs(staff).filter(project="team")[:50].explain()
    assert "USING INDEX job_newest_of_project" in plan
    assert "TEMP B-TREE" not in plan


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL goes by the table's size, and sorts this one")
def test_default_order_uses_an_index(make_jobs: Make, owner: User, staff: User) -> None:
    for user in (owner, staff):
        plan = pages.get_listable_jobs(user)[:50].explain()
        assert "USING INDEX job_newest" in plan
        assert "TEMP B-TREE" not in plan


def test_shows_progress_during_a_long_step(
    make_jobs: Make, owner: User, live_redis: redis.Redis, client: Client
) -> None:
    (job,) = make_jobs(1, status=Status.RUNNING)
    Attempt.objects.create(job=job, number=1)
    send_step(live_redis, job.id, 7)
    send_traffic(live_redis, job.id)
    client.force_login(owner)
    assert client.get("/").content.decode().count("7 of 20") == 2


def test_caches_redis_reads_for_all_users(
    make_jobs: Make, owner: User, live_redis: redis.Redis, client: Client
) -> None:
    jobs = make_jobs(3, status=Status.RUNNING)
    Attempt.objects.bulk_create([Attempt(job=job, number=1) for job in jobs])
    for job in jobs:
        items = [make_step_item(7), {"kind": "log"}]
        live_redis.xadd(telemetry_stream(job.id, 1), {"b": msgpack.packb({"items": items})})
    client.force_login(owner)

    def count_reads() -> int:
        shown: Any = live_redis.info("commandstats")
        return int(shown.get("cmdstat_xrevrange", {"calls": 0})["calls"])

    for _ in range(5):
        assert client.get("/").content.decode().count("7 of 20") == 6  # the bar and the words
    assert count_reads() == 3


def test_list_without_redis_has_no_progress(
    make_jobs: Make, owner: User, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    make_jobs(1, status=Status.RUNNING)
    client.force_login(owner)
    for _ in range(3):
        assert "of 20" in client.get("/").content.decode()
    assert sum("Cannot read progress" in record.message for record in caplog.records) == 1
