"""Who sees and changes which job: by role, at every door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import URLPattern, reverse
from rest_framework.test import APIClient

from jobs.api.urls import urlpatterns
from jobs.core import access
from jobs.models import Attempt, Host, Job, Membership, Project, Role, Status
from jobs.queue import actions
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import count_held_slots, load_quotas
from planner.facts.validation import SpecError
from tests.jobs.queue.test_scheduler import reason
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
MakeJob = Callable[..., Job]
Members = dict[str, User]
ROLES = [role.label for role in Role]


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_what_each_role_may_do_to_another_s_job(
    role: str, members: Members, stranger: User, make_job: MakeJob, api: Api
) -> None:
    job = make_job(members["colleague"])
    rest = api(members.get(role, stranger))
    sees, changes = role in ROLES, role in ("operator", "admin")
    assert rest.get(f"/api/v1/jobs/{job.id}/history").status_code == (200 if sees else 404)
    assert [row["id"] for row in rest.get("/api/v1/jobs").json()] == [job.id] * sees
    refused = 403 if sees else 404
    for path, body in (("cancel", None), ("requeue", None)):
        answer = rest.post(f"/api/v1/jobs/{job.id}/{path}", body, format="json")
        assert answer.status_code == (200 if changes else refused), path
    told = rest.post("/api/v1/jobs/actions", {"action": "tag", "jobs": [job.id], "tags": ["a"]}, format="json")
    assert told.json()["changed"] == [job.id] * changes
    assert job.tags.count() == changes


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("viewer", "Your role in `project` 'team' is viewer."),
        ("nobody", "`project` is 'team', but you are not a member of such a project."),
    ],
)
def test_who_is_no_submitter_submits_nothing(role: str, words: str, members: Members, stranger: User) -> None:
    with pytest.raises(SpecError) as refused:
        actions.submit(members.get(role, stranger), {**GOOD, "project": "team"})
    assert [problem.field for problem in refused.value.problems] == ["project"]
    assert refused.value.problems[0].message.startswith(words)
    assert not Job.objects.exists()


def test_a_project_that_is_not_there_is_refused_as_one_that_is_not_ours(team: Project, stranger: User) -> None:
    told = []
    for name in ("team", "none"):
        with pytest.raises(SpecError) as refused:
            actions.submit(stranger, {**GOOD, "project": name})
        told.append(refused.value.problems[0].message.replace(name, "IT"))
    assert told[0] == told[1]


@pytest.mark.parametrize("role", ["submitter", "operator", "admin"])
def test_who_submits_changes_their_own(role: str, members: Members, api: Api) -> None:
    job, _ = actions.submit(members[role], {**GOOD, "project": "team"})
    assert api(members[role]).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200
    assert api(members[role]).post(f"/api/v1/jobs/{job.id}/requeue").status_code == 200


def test_who_left_a_project_ends_their_job_and_starts_none(members: Members, make_job: MakeJob, api: Api) -> None:
    job = make_job(members["submitter"])
    Membership.objects.filter(user=members["submitter"]).delete()
    rest = api(members["submitter"])
    assert rest.post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200
    assert rest.post(f"/api/v1/jobs/{job.id}/requeue").status_code == 403
    Membership.objects.create(project=Project.objects.get(name="team"), user=members["submitter"], role=Role.VIEWER)
    assert rest.post(f"/api/v1/jobs/{job.id}/requeue").status_code == 403, "nor does a viewer"
    assert Job.objects.get(id=job.id).status == Status.CANCELLED


def test_default_shows_nobody_another_s_job(
    owner: User, stranger: User, make_job: MakeJob, api: Api, client: Client
) -> None:
    """Not even where somebody was written down as a member of it."""
    job = make_job(owner, "default")
    Membership.objects.create(project=Project.objects.get(name="default"), user=stranger, role=Role.ADMIN)
    assert api(stranger).get("/api/v1/jobs").json() == []
    assert api(stranger).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 404
    assert not access.may_change(stranger, job)
    assert not access.may_administer(stranger, "default")
    client.force_login(stranger)
    assert client.post("/queue/act/", {"action": "hold", "job": [job.id]}).status_code == 403


def test_a_role_in_one_project_is_none_in_another(members: Members, owner: User, make_job: MakeJob, api: Api) -> None:
    Project.objects.create(name="other")
    Membership.objects.create(project=Project.objects.get(name="other"), user=owner, role=Role.SUBMITTER)
    job = make_job(owner, "other")
    assert api(members["admin"]).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 404
    assert access.get_role(members["admin"], "other") is None
    assert not access.may_submit_to(members["admin"], "other")


def test_staff_count_as_what_their_rights_say(staff: User, viewer: User, owner: User, team: Project) -> None:
    assert (access.get_role(staff, "team"), access.get_role(viewer, "team")) == (Role.ADMIN, Role.VIEWER)
    assert access.get_role(owner, "team") is None
    owner.is_active = False
    assert access.get_role(owner, "default") is None


def test_operators_run_the_queue_for_their_project_s_jobs_alone(
    members: Members, owner: User, make_job: MakeJob, client: Client, api: Api
) -> None:
    theirs, foreign, own = make_job(members["colleague"]), make_job(owner), make_job(members["operator"], "default")
    Job.objects.filter(id=foreign.id).update(project="default")
    client.force_login(members["operator"])
    page = client.get("/queue/").content.decode()
    assert f'value="{theirs.id}"' in page
    assert f'value="{own.id}"' not in page, "it is in no project of theirs"
    assert foreign.id not in page
    asked = {"action": "hold", "job": [theirs.id, foreign.id, own.id]}
    assert "Hold 1 job?" in client.post("/queue/act/", asked).content.decode()
    client.post("/queue/act/", {**asked, "confirmed": "1"})
    assert list(Job.objects.filter(held=True)) == [theirs]
    rest = api(members["operator"])
    told = rest.post("/api/v1/queue/actions", {"action": "release", "jobs": asked["job"]}, format="json").json()
    assert told["changed"] == [theirs.id]
    assert {row["reason"] for row in told["unchanged"]} == {"The job does not exist."}
    first = {"action": "priority", "jobs": [theirs.id], "priority": 9}
    assert rest.post("/api/v1/queue/actions", first, format="json").status_code == 403
    assert (
        client.post("/queue/act/", {**asked, "action": "priority", "priority": "9", "confirmed": "1"}).status_code
        == 403
    )
    assert rest.post(f"/api/v1/queue/jobs/{theirs.id}/move", {"to": "top"}, format="json").status_code == 403
    assert rest.post("/api/v1/queue/pause").status_code == 403
    assert not Job.objects.filter(priority=9).exists()


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_others_run_no_queue(role: str, members: Members, make_job: MakeJob, client: Client, api: Api) -> None:
    job = make_job(members[role])
    client.force_login(members[role])
    assert client.post("/queue/act/", {"action": "hold", "job": [job.id]}).status_code == 403
    assert 'name="job"' not in client.get("/queue/").content.decode()
    asked = {"action": "hold", "jobs": [job.id]}
    assert api(members[role]).post("/api/v1/queue/actions", asked, format="json").status_code == 403


def test_why_a_job_waits_names_no_job_that_a_member_may_not_see(
    members: Members, make_job: MakeJob, make_host: Callable[..., Host], api: Api
) -> None:
    """Its owner's own, but in no project of the member's."""
    make_host()
    private = make_job(members["submitter"], "default", num_slots=8)
    running = make_job(members["submitter"], "default", num_slots=4)
    Job.objects.filter(id__in=[private.id, running.id]).update(name="the secret one", num_slots=4)
    schedule()
    behind = make_job(members["submitter"], num_slots=4)
    schedule()
    assert "ahead" in reason(behind)
    assert "the secret one" not in reason(behind)
    assert running.id not in reason(behind)
    Job.objects.filter(id__in=[private.id, running.id]).update(project="team", name="an open one")
    schedule()
    assert 'Job "an open one"' in reason(behind)


def test_members_read_whose_a_job_is(members: Members, make_job: MakeJob, client: Client) -> None:
    make_job(members["colleague"])
    client.force_login(members["viewer"])
    assert 'title="colleague">colleague</td>' in client.get("/?col=owner").content.decode()


@pytest.mark.parametrize(
    ("given", "own", "most"), [(None, None, None), (8, None, 8), (8, 4, 4), (4, 8, 4), (None, 4, 4), (8, 0, 0)]
)
def test_a_project_s_own_quota_stays_within_what_staff_gave(
    given: int | None, own: int | None, most: int | None, db: Any
) -> None:
    Project.objects.create(name="team", slots=given, own_slots=own)
    told = load_quotas().get("team")
    assert (told.slots if told else None) == most


OF_A_JOB = [path for path in urlpatterns if "<str:job_id>" in str(path.pattern)]
MAKES_ANOTHER = {"api-copy", "api-resume"}  # a job of one's own, of one that one may look at
OF_ONESELF = {"api-end-mail"}  # what one is mailed: nothing of the job


@pytest.mark.parametrize("path", OF_A_JOB, ids=lambda path: path.name)
def test_who_may_only_look_at_a_job_changes_nothing_of_it(
    path: URLPattern, members: Members, make_job: MakeJob, api: Api
) -> None:
    """Every unsafe method of every address below a job, and of what comes to be one."""
    job = make_job(members["colleague"])
    address = reverse(path.name, kwargs={name: {"job_id": job.id}.get(name, "0") for name in path.pattern.converters})
    allowed = {method for method in ("post", "put", "patch", "delete") if hasattr(path.callback.view_class, method)}  # type: ignore[attr-defined]
    before = Job.objects.filter(id=job.id).values().get()
    for role in ("viewer", "submitter"):
        for method in allowed:
            body = {"step": 1, "add_tags": ["a"], "to": "top"}
            answer = getattr(api(members[role]), method)(address, body, format="json")
            expected = {422} if path.name in MAKES_ANOTHER else {403}
            if path.name in OF_ONESELF:
                expected = {204, 422}
            assert answer.status_code in expected, (method, address, answer.content)
    assert Job.objects.filter(id=job.id).values().get() == before
    assert Job.objects.count() == 1


@pytest.mark.parametrize("name", ["job-cancel", "job-give-up", "job-run-smaller", "job-requeue", "job-check"])
def test_nor_by_its_pages(name: str, members: Members, make_job: MakeJob, client: Client) -> None:
    job = make_job(members["colleague"])
    client.force_login(members["viewer"])
    assert client.post(reverse(name, args=[job.id])).status_code == 403


@pytest.mark.parametrize("name", ["job-detail", "job-timeline"])
def test_who_may_only_look_is_told_who_asks_a_run_for_a_step(
    name: str, members: Members, make_job: MakeJob, client: Client
) -> None:
    job = make_job(members["colleague"])
    for role, asks in (("viewer", False), ("operator", True)):
        client.force_login(members[role])
        shown = client.get(reverse(name, args=[job.id])).content.decode()
        assert ("timeline-wanted" in shown, "can trace more steps" in shown) == (asks, not asks)


@pytest.mark.parametrize("path", ["variables", "invitations", "webhooks", "webhooks/abc", "webhooks/abc/deliveries"])
def test_what_of_a_project_is_not_a_viewer_s_is_refused_alike(
    path: str, members: Members, stranger: User, api: Api, client: Client
) -> None:
    assert api(members["viewer"]).get(f"/api/v1/projects/team/{path}").status_code == 403
    assert api(stranger).get(f"/api/v1/projects/team/{path}").status_code == 404
    if path.startswith("webhooks") and "deliveries" not in path:
        for who, status in ((members["viewer"], 403), (stranger, 404)):
            client.force_login(who)
            assert client.get(f"/projects/team/{path}/").status_code == status


def test_what_slurm_was_handed_counts_to_a_project_s_quota_and_what_others_launched_does_not(
    members: Members, make_job: MakeJob
) -> None:
    Project.objects.filter(name="team").update(slots=8)
    for engine, number, status in (
        ("elsewhere", 64, Status.RUNNING),
        ("hosts", 3, Status.RUNNING),
        ("slurm", 32, Status.QUEUED),
    ):
        job = make_job(members["submitter"], num_slots=number)
        Job.objects.filter(pk=job.pk).update(engine=engine, status=status)
        Attempt.objects.create(job=job, number=1)
    assert load_quotas()["team"].used == 35
    assert count_held_slots(["team"]) == {"team": 3}, "its share is of what it uses"
