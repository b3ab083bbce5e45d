"""Rights of each role to see and change jobs, over REST and on the pages."""

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
def test_rights_of_each_role_on_a_foreign_job(
    role: str, members: Members, stranger: User, make_job: MakeJob, api: Api
) -> None:
    job = make_job(members["colleague"])
    client = api(members.get(role, stranger))
    sees, changes = role in ROLES, role in ("operator", "admin")
    assert client.get(f"/api/v1/jobs/{job.id}/history").status_code == (200 if sees else 404)
    assert [row["id"] for row in client.get("/api/v1/jobs").json()] == [job.id] * sees
    refused = 403 if sees else 404
    for path, body in (("cancel", None), ("requeue", None)):
        response = client.post(f"/api/v1/jobs/{job.id}/{path}", body, format="json")
        assert response.status_code == (200 if changes else refused), path
    response = client.post("/api/v1/jobs/actions", {"action": "tag", "jobs": [job.id], "tags": ["a"]}, format="json")
    assert response.json()["changed"] == [job.id] * changes
    assert job.tags.count() == changes


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("viewer", "Your role in `project` 'team' is viewer."),
        ("nobody", "`project` is 'team', but you are not a member of such a project."),
    ],
)
def test_rejects_jobs_of_users_who_are_not_submitters(
    role: str, message: str, members: Members, stranger: User
) -> None:
    with pytest.raises(SpecError) as refused:
        actions.submit(members.get(role, stranger), {**GOOD, "project": "team"})
    assert [problem.field for problem in refused.value.problems] == ["project"]
    assert refused.value.problems[0].message.startswith(message)
    assert not Job.objects.exists()


def test_missing_and_foreign_projects_give_the_same_error(team: Project, stranger: User) -> None:
    messages = []
    for name in ("team", "none"):
        with pytest.raises(SpecError) as refused:
            actions.submit(stranger, {**GOOD, "project": name})
        messages.append(refused.value.problems[0].message.replace(name, "IT"))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("role", ["submitter", "operator", "admin"])
def test_submitters_change_own_jobs(role: str, members: Members, api: Api) -> None:
    job, _ = actions.submit(members[role], {**GOOD, "project": "team"})
    assert api(members[role]).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200
    assert api(members[role]).post(f"/api/v1/jobs/{job.id}/requeue").status_code == 200


def test_former_member_can_cancel_but_not_start_own_jobs(members: Members, make_job: MakeJob, api: Api) -> None:
    job = make_job(members["submitter"])
    Membership.objects.filter(user=members["submitter"]).delete()
    client = api(members["submitter"])
    assert client.post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200
    assert client.post(f"/api/v1/jobs/{job.id}/requeue").status_code == 403
    Membership.objects.create(project=Project.objects.get(name="team"), user=members["submitter"], role=Role.VIEWER)
    assert client.post(f"/api/v1/jobs/{job.id}/requeue").status_code == 403, "viewers cannot start jobs"
    assert Job.objects.get(id=job.id).status == Status.CANCELLED


def test_default_project_hides_foreign_jobs(
    owner: User, stranger: User, make_job: MakeJob, api: Api, client: Client
) -> None:
    """Jobs in the default project are private even if a membership row exists."""
    job = make_job(owner, "default")
    Membership.objects.create(project=Project.objects.get(name="default"), user=stranger, role=Role.ADMIN)
    assert api(stranger).get("/api/v1/jobs").json() == []
    assert api(stranger).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 404
    assert not access.may_change(stranger, job)
    assert not access.may_administer(stranger, "default")
    client.force_login(stranger)
    assert client.post("/queue/act/", {"action": "hold", "job": [job.id]}).status_code == 403


def test_role_is_valid_in_its_project_only(members: Members, owner: User, make_job: MakeJob, api: Api) -> None:
    Project.objects.create(name="other")
    Membership.objects.create(project=Project.objects.get(name="other"), user=owner, role=Role.SUBMITTER)
    job = make_job(owner, "other")
    assert api(members["admin"]).post(f"/api/v1/jobs/{job.id}/cancel").status_code == 404
    assert access.get_role(members["admin"], "other") is None
    assert not access.may_submit_to(members["admin"], "other")


def test_staff_rights_give_a_role_in_every_project(staff: User, viewer: User, owner: User, team: Project) -> None:
    assert (access.get_role(staff, "team"), access.get_role(viewer, "team")) == (Role.ADMIN, Role.VIEWER)
    assert access.get_role(owner, "team") is None
    owner.is_active = False
    assert access.get_role(owner, "default") is None


def test_operators_change_only_jobs_of_their_projects(
    members: Members, owner: User, make_job: MakeJob, client: Client, api: Api
) -> None:
    of_colleague, foreign, own = (
        make_job(members["colleague"]),
        make_job(owner),
        make_job(members["operator"], "default"),
    )
    Job.objects.filter(id=foreign.id).update(project="default")
    client.force_login(members["operator"])
    page = client.get("/queue/").content.decode()
    assert f'value="{of_colleague.id}"' in page
    assert f'value="{own.id}"' not in page, "operators do not operate the default project"
    assert foreign.id not in page
    body = {"action": "hold", "job": [of_colleague.id, foreign.id, own.id]}
    assert "Hold 1 job?" in client.post("/queue/act/", body).content.decode()
    client.post("/queue/act/", {**body, "confirmed": "1"})
    assert list(Job.objects.filter(held=True)) == [of_colleague]
    rest = api(members["operator"])
    result = rest.post("/api/v1/queue/actions", {"action": "release", "jobs": body["job"]}, format="json").json()
    assert result["changed"] == [of_colleague.id]
    assert {row["reason"] for row in result["unchanged"]} == {"The job does not exist."}
    first = {"action": "priority", "jobs": [of_colleague.id], "priority": 9}
    assert rest.post("/api/v1/queue/actions", first, format="json").status_code == 403
    assert (
        client.post("/queue/act/", {**body, "action": "priority", "priority": "9", "confirmed": "1"}).status_code == 403
    )
    assert rest.post(f"/api/v1/queue/jobs/{of_colleague.id}/move", {"to": "top"}, format="json").status_code == 403
    assert rest.post("/api/v1/queue/pause").status_code == 403
    assert not Job.objects.filter(priority=9).exists()


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_viewers_and_submitters_cannot_change_the_queue(
    role: str, members: Members, make_job: MakeJob, client: Client, api: Api
) -> None:
    job = make_job(members[role])
    client.force_login(members[role])
    assert client.post("/queue/act/", {"action": "hold", "job": [job.id]}).status_code == 403
    assert 'name="job"' not in client.get("/queue/").content.decode()
    body = {"action": "hold", "jobs": [job.id]}
    assert api(members[role]).post("/api/v1/queue/actions", body, format="json").status_code == 403


def test_wait_reason_names_no_hidden_job(
    members: Members, make_job: MakeJob, make_host: Callable[..., Host], api: Api
) -> None:
    """The reason names no job that is outside the projects of the member."""
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


def test_members_see_the_owner_of_a_job(members: Members, make_job: MakeJob, client: Client) -> None:
    make_job(members["colleague"])
    client.force_login(members["viewer"])
    assert 'title="colleague">colleague</td>' in client.get("/?col=owner").content.decode()


@pytest.mark.parametrize(
    ("staff_slots", "own_slots", "expected"),
    [(None, None, None), (8, None, 8), (8, 4, 4), (4, 8, 4), (None, 4, 4), (8, 0, 0)],
)
def test_lower_of_two_quotas_is_the_limit(
    staff_slots: int | None, own_slots: int | None, expected: int | None, db: Any
) -> None:
    Project.objects.create(name="team", slots=staff_slots, own_slots=own_slots)
    quota = load_quotas().get("team")
    assert (quota.slots if quota else None) == expected


JOB_ROUTES = [path for path in urlpatterns if "<str:job_id>" in str(path.pattern)]
MAKES_ANOTHER = {"api-copy", "api-resume"}  # Creates an own job from a visible job.
OWN_SETTINGS = {"api-end-mail"}  # Changes only the mails of the user.


@pytest.mark.parametrize("path", JOB_ROUTES, ids=lambda path: path.name)
def test_rest_rejects_changes_by_viewers(path: URLPattern, members: Members, make_job: MakeJob, api: Api) -> None:
    """Check each method that changes data on each REST address of a job."""
    job = make_job(members["colleague"])
    address = reverse(path.name, kwargs={name: {"job_id": job.id}.get(name, "0") for name in path.pattern.converters})
    allowed = {method for method in ("post", "put", "patch", "delete") if hasattr(path.callback.view_class, method)}  # type: ignore[attr-defined]
    before = Job.objects.filter(id=job.id).values().get()
    for role in ("viewer", "submitter"):
        for method in allowed:
            body = {"step": 1, "add_tags": ["a"], "to": "top"}
            response = getattr(api(members[role]), method)(address, body, format="json")
            expected = {422} if path.name in MAKES_ANOTHER else {403}
            if path.name in OWN_SETTINGS:
                expected = {204, 422}
            assert response.status_code in expected, (method, address, response.content)
    assert Job.objects.filter(id=job.id).values().get() == before
    assert Job.objects.count() == 1


@pytest.mark.parametrize("name", ["job-cancel", "job-give-up", "job-run-smaller", "job-requeue", "job-check"])
def test_pages_reject_changes_by_viewers(name: str, members: Members, make_job: MakeJob, client: Client) -> None:
    job = make_job(members["colleague"])
    client.force_login(members["viewer"])
    assert client.post(reverse(name, args=[job.id])).status_code == 403


@pytest.mark.parametrize("name", ["job-detail", "job-timeline"])
def test_page_offers_step_traces_only_to_operators(
    name: str, members: Members, make_job: MakeJob, client: Client
) -> None:
    job = make_job(members["colleague"])
    for role, can_trace in (("viewer", False), ("operator", True)):
        client.force_login(members[role])
        shown = client.get(reverse(name, args=[job.id])).content.decode()
        assert ("timeline-wanted" in shown, "can trace more steps" in shown) == (can_trace, not can_trace)


@pytest.mark.parametrize("path", ["variables", "invitations", "webhooks", "webhooks/abc", "webhooks/abc/deliveries"])
def test_viewers_cannot_read_secrets_of_a_project(
    path: str, members: Members, stranger: User, api: Api, client: Client
) -> None:
    assert api(members["viewer"]).get(f"/api/v1/projects/team/{path}").status_code == 403
    assert api(stranger).get(f"/api/v1/projects/team/{path}").status_code == 404
    if path.startswith("webhooks") and "deliveries" not in path:
        for who, status in ((members["viewer"], 403), (stranger, 404)):
            client.force_login(who)
            assert client.get(f"/projects/team/{path}/").status_code == status


def test_quota_counts_slurm_jobs_but_no_external_runs(members: Members, make_job: MakeJob) -> None:
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
    assert count_held_slots(["team"]) == {"team": 3}, "only slots on hosts count for the fair share"
