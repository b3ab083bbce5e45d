"""One rule of access at every door, and looking is not changing."""

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


def resuming(checkpoint: str) -> dict[str, Any]:
    return {**GOOD, "train": {**GOOD["train"], "resume": checkpoint}}


@pytest.mark.parametrize("ending", ["", "/1", "/1/step-00000003"])
def test_a_checkpoint_is_resumed_by_who_may_see_its_job(
    owner: User, stranger: User, staff: User, api: Api, job: Job, ending: str
) -> None:
    told = {}
    for words, checkpoint in (("theirs", f"{job.id}{ending}"), ("nobody's", f"nosuchjob{ending}")):
        answer = api(stranger).post("/api/v1/jobs", resuming(checkpoint), format="json")
        assert answer.status_code == 422
        error = answer.json()["errors"][0]
        assert error["field"] == "train.resume"
        told[words] = error["message"].replace(checkpoint, "IT")
    assert told["theirs"] == told["nobody's"]
    for who in (owner, staff):
        assert api(who).post("/api/v1/jobs", resuming(f"{job.id}{ending}"), format="json").status_code == 201


@pytest.mark.parametrize("prefix", ["./", "/", "x/../", "//"])
def test_no_spelling_of_a_checkpoint_gets_round_that(stranger: User, api: Api, job: Job, prefix: str) -> None:
    assert api(stranger).post("/api/v1/jobs", resuming(prefix + job.id), format="json").status_code == 422


DOORS = [
    "/api/v1/jobs/{id}",
    "/jobs/{id}/",
    "/jobs/new/?from={id}",
    "/jobs/script/?from={id}",
    "/collectives/?from={id}",
]


@pytest.mark.parametrize("door", DOORS)
def test_a_stranger_finds_no_job_at_any_door(stranger: User, client: Any, job: Job, door: str) -> None:
    client.force_login(stranger)
    assert client.get(door.format(id=job.id)).status_code == 404
    assert client.get(door.format(id="nosuchjob")).status_code == 404


def test_a_stranger_reads_of_no_job_in_lists_and_on_host_pages(
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


def test_why_a_job_waits_names_no_job_of_others(
    owner: User, stranger: User, api: Api, job: Job, make_host: Callable[..., Host]
) -> None:
    make_host()
    schedule()
    waiting, _ = actions.submit(owner, {**GOOD, "name": "the owner's next"})
    behind, _ = actions.submit(stranger, GOOD)
    schedule()
    told = api(stranger).get(f"/api/v1/jobs/{behind.id}").json()
    assert told["wait_reason"]
    text = str({**told, "id": None})
    assert not any(secret in text for secret in (job.id, waiting.id, "the owner's"))


CHANGES = ["/api/v1/jobs/{id}/cancel", "/api/v1/jobs/{id}/requeue", "/jobs/{id}/cancel/", "/jobs/{id}/requeue/"]


@pytest.mark.parametrize(
    "path", [*CHANGES, *("/api/v1/hosts/host-a/calibrate", "/api/v1/hosts/host-a/give-up", "/hosts/host-a/calibrate/")]
)
def test_staff_that_may_only_look_changes_nothing(
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
def test_what_takes_no_body_refuses_one(
    staff: User, api: Api, job: Job, make_host: Callable[..., Host], path: str, sent: object, field: str
) -> None:
    """Rather than ignore a wish."""
    make_host()
    before = (Job.objects.values().get(), Host.objects.values().get())
    answer = api(staff).post(path.format(id=job.id), sent, format="json")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert (Job.objects.values().get(), Host.objects.values().get()) == before


def test_a_page_offers_staff_that_may_only_look_nothing_to_change(viewer: User, client: Any, job: Job) -> None:
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
def test_nor_in_the_admin(
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


@pytest.mark.parametrize("door", ["list", "form"])
def test_a_priority_edited_while_a_job_is_placed_leaves_it_placed(
    staff: User, client: Any, job: Job, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """Between what the admin read and what it writes."""
    save = JobAdmin.save_model

    def placed_meanwhile(self: Any, *arguments: Any, **named: Any) -> None:
        assert lifecycle.change_status(job.id, 1, Status.STARTING, "placed")
        save(self, *arguments, **named)

    monkeypatch.setattr(JobAdmin, "save_model", placed_meanwhile)
    client.force_login(staff)
    form = {"priority": "7", "_save": "Save"}
    path = f"/admin/jobs/job/{job.id}/change/"
    for inline in ("history", "attempts"):
        form |= {f"{inline}-TOTAL_FORMS": "0", f"{inline}-INITIAL_FORMS": "0"}
    if door == "list":
        path = "/admin/jobs/job/"
        form = {"form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "1", "form-0-id": job.id, "form-0-priority": "7"}
        form["_save"] = "Save"
    assert client.post(path, form).status_code == 302
    job.refresh_from_db()
    assert (job.priority, job.status) == (7, Status.STARTING)


def test_a_token_ends_after_its_days(owner: User, settings: Any, api: Api) -> None:
    client = api(owner)
    token = AuthToken.objects.get()
    assert timedelta(days=89) < token.expiry - timezone.now() <= timedelta(days=90)
    assert client.get("/api/v1/jobs").status_code == 200
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    assert client.get("/api/v1/jobs").status_code == 401


def test_the_local_demo_s_token_lives_on_with_each_start(db: None, tmp_path: Any, capsys: Any) -> None:
    call_command("meshboard_user")
    kept = tmp_path / "up.json"
    kept.write_text(first := capsys.readouterr().out)
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    call_command("meshboard_user", keep=kept)
    import json

    token = json.loads(capsys.readouterr().out)["api_token"]
    assert token == json.loads(first)["api_token"]
    assert APIClient(headers={"Authorization": f"Token {token}"}).get("/api/v1/jobs").status_code == 200


def test_a_silent_host_is_given_up_over_rest_and_one_that_speaks_is_not(
    staff: User, owner: User, api: Api, job: Job, make_host: Callable[..., Host]
) -> None:
    host = make_host()
    schedule()
    path = f"/api/v1/hosts/{host.name}/give-up"
    assert api(owner).post(path).status_code == 403
    refused = api(staff).post(path)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "host")
    Host.objects.update(last_seen=timezone.now() - timedelta(minutes=1))
    given = api(staff).post(path)
    assert (given.status_code, given.json()) == (200, {"lost": 1})
    job.refresh_from_db()
    assert job.status == Status.LOST
    assert api(staff).post("/api/v1/hosts/nowhere/give-up").status_code == 404


def test_a_list_is_narrowed_over_rest_as_on_the_page(
    owner: User, stranger: User, staff: User, api: Api, job: Job
) -> None:
    other, _ = actions.submit(owner, {**GOOD, "name": "second"})
    theirs, _ = actions.submit(stranger, GOOD)
    of_team, _ = actions.submit(staff, {**GOOD, "project": Project.objects.create(name="team").name})
    actions.cancel(other, "owner")

    def ids(user: User, query: str) -> set[str]:
        answer = api(user).get(f"/api/v1/jobs?{query}")
        assert answer.status_code == 200, answer.content
        return {found["id"] for found in answer.json()}

    assert ids(owner, "status=cancelled") == {other.id}
    assert ids(owner, f"q={job.id}") == {job.id}
    assert ids(owner, "q=SECOND&kind=train") == {other.id}
    assert ids(owner, "kind=lab") == set()
    assert ids(owner, "project=default") == {job.id, other.id}
    assert ids(owner, "project=team") == ids(owner, "project=nowhere") == set(), "theirs, and none"
    assert ids(staff, "project=team") == {of_team.id}
    (line,) = api(staff).get("/api/v1/jobs?project=team").json()
    assert (line["project"], line["kind"]) == ("team", "train")
    assert ids(owner, "owner=owner") == {job.id, other.id}
    assert ids(owner, "owner=stranger") == set()
    assert ids(staff, "owner=stranger") == {theirs.id}
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
def test_a_filter_that_makes_no_sense_is_named(owner: User, api: Api, query: str, fields: set[str]) -> None:
    answer = api(owner).get(f"/api/v1/jobs?{query}")
    assert answer.status_code == 400
    assert {error["field"] for error in answer.json()["errors"]} == fields


def test_an_unknown_state_lists_those_there_are(owner: User, api: Api) -> None:
    (error,) = api(owner).get("/api/v1/jobs?status=done").json()["errors"]
    assert error["message"].startswith("The value 'done' is unknown. Use one or more of queued, ")
    assert error["message"].endswith("active (all jobs that have not ended).")
    (error,) = api(owner).get("/api/v1/jobs?kind=train,burnt").json()["errors"]
    assert error["message"] == (
        "The value 'burnt' is unknown. Use one or more of train, script, dry_run, lab, calibrate."
    )


def test_pages_of_a_list_follow_each_other_by_their_link(owner: User, api: Api) -> None:
    made = [actions.submit(owner, {**GOOD, "name": f"page {number}"})[0].id for number in range(5)]
    seen, sizes, address = [], [], "/api/v1/jobs?limit=2&q=page"
    while address:
        answer = api(owner).get(address)
        assert answer.status_code == 200, answer.content
        seen += [job["id"] for job in answer.json()]
        sizes.append(len(answer.json()))
        link = answer.headers.get("Link", "")
        assert not link or link.endswith('>; rel="next"')
        address = link.removeprefix("<").partition(">")[0]
    assert (seen, sizes) == (made[::-1], [2, 2, 1])


def test_a_plan_tells_what_a_submit_would_of_a_checkpoint_that_is_not_there(
    owner: User, stranger: User, api: Api
) -> None:
    theirs, _ = actions.submit(stranger, GOOD)
    for resume in ("nowhere", theirs.id):
        draft = {**GOOD, "train": {**GOOD["train"], "resume": resume}}
        (blocked,) = api(owner).post("/api/v1/plan", draft, format="json").json()["not_runnable"]
        assert blocked["field"] == "train.resume"
        assert "the job does not exist, or you cannot see it" in blocked["message"]
        (refused,) = api(owner).post("/api/v1/jobs", draft, format="json").json()["errors"]
        assert refused == {**blocked, "pointer": "/train/resume", "in": "body"}


def test_a_plan_tells_of_verify_what_a_submit_would(owner: User, api: Api) -> None:
    large = {"model": {"preset": "llama2-7b"}, "train": {"verify": "on"}}
    told = api(owner).post("/api/v1/plan", large, format="json").json()["problems"]
    assert "train.verify" in {problem["field"] for problem in told}
    refused = api(owner).post("/api/v1/jobs", large, format="json").json()["errors"]
    wrong = next(problem for problem in told if problem["field"] == "train.verify")
    assert {**wrong, "pointer": "/train/verify", "in": "body"} in refused
