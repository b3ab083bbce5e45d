"""Access to jobs over REST, on pages, and in the admin, and filters of the list of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.management import call_command
from django.utils import timezone
from knox.models import AuthToken
from rest_framework.test import APIClient

from jobs.admin.jobs import JobAdmin
from jobs.models import Host, Job, Project, Status
from jobs.queue import actions, lifecycle
from jobs.queue.scheduling.scheduler import schedule
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()


@pytest.fixture
def job(owner: User) -> Job:
    train = {**GOOD["train"], "checkpoint_every": 1}
    made, _ = actions.submit(owner, {**GOOD, "name": "the owner's own", "train": train})
    return made


def make_spec(checkpoint: str) -> dict[str, Any]:
    return {**GOOD, "train": {**GOOD["train"], "resume": checkpoint}}


@pytest.mark.parametrize("ending", ["", "/1", "/1/step-00000003"])
def test_resumes_only_visible_checkpoints(
    owner: User, stranger: User, staff: User, api: Api, job: Job, ending: str
) -> None:
    messages = {}
    for case, checkpoint in (("foreign", f"{job.id}{ending}"), ("missing", f"nosuchjob{ending}")):
        response = api(stranger).post("/api/v1/jobs", make_spec(checkpoint), format="json")
        assert response.status_code == 422
        error = response.json()["errors"][0]
        assert error["field"] == "train.resume"
        messages[case] = error["message"].replace(checkpoint, "IT")
    assert messages["foreign"] == messages["missing"]
    for who in (owner, staff):
        assert api(who).post("/api/v1/jobs", make_spec(f"{job.id}{ending}"), format="json").status_code == 201


@pytest.mark.parametrize("prefix", ["./", "/", "x/../", "//"])
def test_rejects_path_prefixes_of_checkpoints(stranger: User, api: Api, job: Job, prefix: str) -> None:
    assert api(stranger).post("/api/v1/jobs", make_spec(prefix + job.id), format="json").status_code == 422


JOB_ADDRESSES = [
    "/api/v1/jobs/{id}",
    "/jobs/{id}/",
    "/jobs/new/?from={id}",
    "/jobs/script/?from={id}",
    "/collectives/?from={id}",
]


@pytest.mark.parametrize("address", JOB_ADDRESSES)
def test_foreign_jobs_are_404(stranger: User, client: Any, job: Job, address: str) -> None:
    client.force_login(stranger)
    assert client.get(address.format(id=job.id)).status_code == 404
    assert client.get(address.format(id="nosuchjob")).status_code == 404


def test_lists_and_host_pages_hide_foreign_jobs(
    staff: User, stranger: User, client: Any, job: Job, make_host: Callable[..., Host]
) -> None:
    host = make_host()
    calibration = actions.submit_calibration(staff, host)
    pages = [
        "/",
        f"/hosts/{host.name}/",
        "/hosts/",
        "/collectives/",
        "/collectives/all-reduce/",
        "/api/v1/jobs",
        "/api/v1/hosts",
    ]
    for who, sees in ((staff, True), (stranger, False)):
        client.force_login(who)
        text = "".join(client.get(page).content.decode() for page in pages)
        assert (calibration.id in text) is sees
        assert (job.id in text) is sees
        assert ("the owner&#x27;s own" in text) is sees


def test_wait_reason_names_no_foreign_job(
    owner: User, stranger: User, api: Api, job: Job, make_host: Callable[..., Host]
) -> None:
    make_host()
    schedule()
    waiting, _ = actions.submit(owner, {**GOOD, "name": "the owner's next"})
    behind, _ = actions.submit(stranger, GOOD)
    schedule()
    job_of_stranger = api(stranger).get(f"/api/v1/jobs/{behind.id}").json()
    assert job_of_stranger["wait_reason"]
    text = str({**job_of_stranger, "id": None})
    assert not any(secret in text for secret in (job.id, waiting.id, "the owner's"))


CHANGES = ["/api/v1/jobs/{id}/cancel", "/api/v1/jobs/{id}/requeue", "/jobs/{id}/cancel/", "/jobs/{id}/requeue/"]


@pytest.mark.parametrize(
    "path", [*CHANGES, *("/api/v1/hosts/host-a/calibrate", "/api/v1/hosts/host-a/give-up", "/hosts/host-a/calibrate/")]
)
def test_viewing_staff_cannot_change_anything(
    viewer: User, client: Any, job: Job, make_host: Callable[..., Host], path: str
) -> None:
    make_host()
    client.force_login(viewer)
    assert client.get(f"/api/v1/jobs/{job.id}").status_code == 200
    assert client.post(path.format(id=job.id)).status_code == 403
    job.refresh_from_db()
    assert (job.status, Job.objects.count()) == (Status.QUEUED, 1)


@pytest.mark.parametrize("path", [*CHANGES[:2], "/api/v1/hosts/host-a/calibrate", "/api/v1/hosts/host-a/give-up"])
@pytest.mark.parametrize(("sent", "field"), [({"slots": 2}, "slots"), ([1], "request"), ("all", "request")])
def test_rejects_an_unexpected_body(
    staff: User, api: Api, job: Job, make_host: Callable[..., Host], path: str, sent: object, field: str
) -> None:
    """A body with options must not be ignored silently."""
    make_host()
    before = (Job.objects.values().get(), Host.objects.values().get())
    response = api(staff).post(path.format(id=job.id), sent, format="json")
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)
    assert (Job.objects.values().get(), Host.objects.values().get()) == before


def test_page_hides_actions_from_viewing_staff(viewer: User, client: Any, job: Job) -> None:
    def hidden(user: User) -> list[bool]:
        client.force_login(user)
        page = client.get(f"/jobs/{job.id}/").content.decode()
        forms = re.findall(r'<form id="(?:requeue|cancel)-form"[^>]*>', page)
        return [" hidden" in form and "data-may-not" in form for form in forms]

    assert hidden(viewer) == [True, True]
    assert hidden(job.owner) == [False, False]


@pytest.mark.parametrize(
    ("model", "action"), [("job", "cancel"), ("job", "requeue"), ("host", "drain"), ("host", "undrain")]
)
def test_viewing_staff_cannot_change_anything_in_the_admin(
    viewer: User, client: Any, job: Job, make_host: Callable[..., Host], model: str, action: str
) -> None:
    host = make_host()
    if action == "requeue":
        actions.cancel(job, "owner")
    if action == "undrain":
        Host.objects.update(drained=True)
    before = (Job.objects.values().get(), Host.objects.values().get())
    client.force_login(viewer)
    key = job.id if model == "job" else host.pk
    client.post(f"/admin/jobs/{model}/", {"action": action, "_selected_action": [key]}, follow=True)
    assert (Job.objects.values().get(), Host.objects.values().get()) == before


@pytest.mark.parametrize("address", ["list", "form"])
def test_admin_edit_does_not_overwrite_the_status(
    staff: User, client: Any, job: Job, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """The scheduler places the job after the admin page was read and before it is saved."""
    save = JobAdmin.save_model

    def place_and_save(self: Any, *arguments: Any, **options: Any) -> None:
        assert lifecycle.change_status(job.id, 1, Status.STARTING, "placed")
        save(self, *arguments, **options)

    monkeypatch.setattr(JobAdmin, "save_model", place_and_save)
    client.force_login(staff)
    form = {"priority": "7", "_save": "Save"}
    path = f"/admin/jobs/job/{job.id}/change/"
    for inline in ("history", "attempts"):
        form |= {f"{inline}-TOTAL_FORMS": "0", f"{inline}-INITIAL_FORMS": "0"}
    if address == "list":
        path = "/admin/jobs/job/"
        form = {"form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "1", "form-0-id": job.id, "form-0-priority": "7"}
        form["_save"] = "Save"
    assert client.post(path, form).status_code == 302
    job.refresh_from_db()
    assert (job.priority, job.status) == (7, Status.STARTING)


def test_token_expires(owner: User, settings: Any, api: Api) -> None:
    client = api(owner)
    token = AuthToken.objects.get()
    assert timedelta(days=89) < token.expiry - timezone.now() <= timedelta(days=90)
    assert client.get("/api/v1/jobs").status_code == 200
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    assert client.get("/api/v1/jobs").status_code == 401


def test_demo_restart_extends_its_token(db: None, tmp_path: Any, capsys: Any) -> None:
    call_command("meshboard_user")
    state_file = tmp_path / "up.json"
    state_file.write_text(first := capsys.readouterr().out)
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    call_command("meshboard_user", keep=state_file)
    import json

    token = json.loads(capsys.readouterr().out)["api_token"]
    assert token == json.loads(first)["api_token"]
    assert APIClient(headers={"Authorization": f"Token {token}"}).get("/api/v1/jobs").status_code == 200


def test_rest_marks_only_silent_hosts_as_lost(
    staff: User, owner: User, api: Api, job: Job, make_host: Callable[..., Host]
) -> None:
    host = make_host()
    schedule()
    path = f"/api/v1/hosts/{host.name}/give-up"
    assert api(owner).post(path).status_code == 403
    refused = api(staff).post(path)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "host")
    Host.objects.update(last_seen=timezone.now() - timedelta(minutes=1))
    accepted = api(staff).post(path)
    assert (accepted.status_code, accepted.json()) == (200, {"lost": 1})
    job.refresh_from_db()
    assert job.status == Status.LOST
    assert api(staff).post("/api/v1/hosts/nowhere/give-up").status_code == 404


def test_rest_filters_jobs(owner: User, stranger: User, staff: User, api: Api, job: Job) -> None:
    other, _ = actions.submit(owner, {**GOOD, "name": "second"})
    foreign, _ = actions.submit(stranger, GOOD)
    of_team, _ = actions.submit(staff, {**GOOD, "project": Project.objects.create(name="team").name})
    actions.cancel(other, "owner")

    def ids(user: User, query: str) -> set[str]:
        response = api(user).get(f"/api/v1/jobs?{query}")
        assert response.status_code == 200, response.content
        return {found["id"] for found in response.json()}

    assert ids(owner, "status=cancelled") == {other.id}
    assert ids(owner, f"q={job.id}") == {job.id}
    assert ids(owner, "q=SECOND&kind=train") == {other.id}
    assert ids(owner, "kind=lab") == set()
    assert ids(owner, "project=default") == {job.id, other.id}
    assert ids(owner, "project=team") == ids(owner, "project=nowhere") == set(), (
        "foreign and unknown projects give the same result"
    )
    assert ids(staff, "project=team") == {of_team.id}
    (line,) = api(staff).get("/api/v1/jobs?project=team").json()
    assert (line["project"], line["kind"]) == ("team", "train")
    assert ids(owner, "owner=owner") == {job.id, other.id}
    assert ids(owner, "owner=stranger") == set()
    assert ids(staff, "owner=stranger") == {foreign.id}
    assert len(ids(staff, "limit=2")) == 2


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("status=done", {"status"}),
        ("kind=", {"kind"}),
        ("kind=train,", {"kind"}),
        ("kind=train&kind=lab", {"kind"}),
        ("tag=" + "x" * 1021, {"tag"}),
        ("status=queued&status=failed", {"status"}),
        ("limit=0&kind=none", {"limit", "kind"}),
        ("q=" + "x" * 101, {"q"}),
        ("q=%20", {"q"}),
        ("project=", {"project"}),
        ("archived=1", {"archived"}),
        ("owner=", {"owner"}),
        ("state=queued&limti=1", {"state", "limti"}),
        ("offset=-1", {"offset"}),
        ("offset=1&offset=2", {"offset"}),
    ],
)
def test_rejects_invalid_filters(owner: User, api: Api, query: str, fields: set[str]) -> None:
    response = api(owner).get(f"/api/v1/jobs?{query}")
    assert response.status_code == 400
    assert {error["field"] for error in response.json()["errors"]} == fields


def test_unknown_filter_value_lists_the_valid_ones(owner: User, api: Api) -> None:
    (error,) = api(owner).get("/api/v1/jobs?status=done").json()["errors"]
    assert error["message"].startswith("The value 'done' is unknown. Use one or more of queued, ")
    assert error["message"].endswith("active (all jobs that have not ended).")
    (error,) = api(owner).get("/api/v1/jobs?kind=train,burnt").json()["errors"]
    assert error["message"] == (
        "The value 'burnt' is unknown. Use one or more of train, script, dry_run, lab, calibrate."
    )


def test_link_header_leads_to_the_next_page(owner: User, api: Api) -> None:
    made = [actions.submit(owner, {**GOOD, "name": f"page {number}"})[0].id for number in range(5)]
    seen, sizes, address = [], [], "/api/v1/jobs?limit=2&q=page"
    while address:
        response = api(owner).get(address)
        assert response.status_code == 200, response.content
        seen += [job["id"] for job in response.json()]
        sizes.append(len(response.json()))
        link = response.headers.get("Link", "")
        assert not link or link.endswith('>; rel="next"')
        address = link.removeprefix("<").partition(">")[0]
    assert (seen, sizes) == (made[::-1], [2, 2, 1])


def test_plan_reports_a_missing_checkpoint(owner: User, stranger: User, api: Api) -> None:
    foreign, _ = actions.submit(stranger, GOOD)
    for resume in ("nowhere", foreign.id):
        draft = {**GOOD, "train": {**GOOD["train"], "resume": resume}}
        (blocked,) = api(owner).post("/api/v1/plan", draft, format="json").json()["not_runnable"]
        assert blocked["field"] == "train.resume"
        assert "the job does not exist, or you cannot see it" in blocked["message"]
        (refused,) = api(owner).post("/api/v1/jobs", draft, format="json").json()["errors"]
        assert refused == {**blocked, "pointer": "/train/resume", "in": "body"}


def test_plan_reports_an_invalid_verify_option(owner: User, api: Api) -> None:
    large = {"model": {"preset": "llama2-7b"}, "train": {"verify": "on"}}
    problems = api(owner).post("/api/v1/plan", large, format="json").json()["problems"]
    assert "train.verify" in {problem["field"] for problem in problems}
    refused = api(owner).post("/api/v1/jobs", large, format="json").json()["errors"]
    wrong = next(problem for problem in problems if problem["field"] == "train.verify")
    assert {**wrong, "pointer": "/train/verify", "in": "body"} in refused
