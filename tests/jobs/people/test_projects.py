"""Members, invitations, and quota of projects, over REST and on the pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.core import access
from jobs.models import AuditEntry, BaselineRun, Invitation, Job, MailWish, Membership, Project, Role, Webhook
from jobs.queue import actions
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
Members = dict[str, User]
ROLES = [role.label for role in Role]


def test_invitation_is_shown_once_hashed_and_used_once(
    members: Members, owner: User, stranger: User, api: Api, client: Client
) -> None:
    response = api(members["admin"]).post(
        "/api/v1/projects/team/invitations", {"role": "operator", "note": "Ann"}, format="json"
    )
    assert (response.status_code, response.headers["Cache-Control"]) == (201, "no-store")
    token, url = response.json()["token"], response.json()["url"]
    assert token not in api(members["admin"]).get("/api/v1/projects/team/invitations").content.decode()
    assert token not in str([*Invitation.objects.values(), *AuditEntry.objects.values()])
    client.force_login(owner)
    page = client.get(url)
    assert "Join team?" in page.content.decode()
    assert access.get_role(owner, "team") is None, "viewing the invitation does not accept it"
    assert client.post(url).status_code == 302
    assert access.get_role(owner, "team") == Role.OPERATOR
    second = api(stranger).post("/api/v1/invitations/accept", {"token": token}, format="json")
    assert (second.status_code, second.json()["errors"][0]["field"]) == (409, "token")
    assert access.get_role(stranger, "team") is None
    entries = [(entry.who, entry.what) for entry in AuditEntry.objects.filter(kind="project", name="team")]
    assert entries == [("owner", "join"), ("admin", "invite")]


@pytest.mark.parametrize("end", ["expires", "revoked"])
def test_rejects_expired_and_revoked_invitations(end: str, members: Members, owner: User, api: Api) -> None:
    client = api(members["admin"])
    invitation = client.post("/api/v1/projects/team/invitations", {"role": "viewer"}, format="json").json()
    if end == "expires":
        Invitation.objects.update(expires=timezone.now() - timedelta(seconds=1))
    else:
        assert client.delete(f"/api/v1/projects/team/invitations/{invitation['id']}").status_code == 204
    assert (
        api(owner).post("/api/v1/invitations/accept", {"token": invitation["token"]}, format="json").status_code == 409
    )
    assert access.get_role(owner, "team") is None


def test_invitation_does_not_lower_a_role(members: Members, api: Api) -> None:
    invitation = (
        api(members["admin"]).post("/api/v1/projects/team/invitations", {"role": "viewer"}, format="json").json()
    )
    api(members["operator"]).post("/api/v1/invitations/accept", {"token": invitation["token"]}, format="json")
    assert access.get_role(members["operator"], "team") == Role.OPERATOR


WRITES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("patch", "", {"own_slots": 1}),
    ("put", "/members/viewer", {"role": "admin"}),
    ("delete", "/members/viewer", None),
    ("post", "/invitations", {"role": "admin"}),
    ("delete", "/invitations/1", None),
    ("put", "/variables/JOB_X", {"value": "x"}),
    ("delete", "/variables/JOB_X", None),
]


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_only_admins_change_a_project(role: str, members: Members, stranger: User, api: Api) -> None:
    client = api(members.get(role, stranger))
    before = sorted(Membership.objects.values_list("user__username", "role"))
    for method, path, body in WRITES:
        if (role, path) == ("viewer", "/members/viewer") and method == "delete":
            continue  # Every member can leave.
        response = getattr(client, method)(f"/api/v1/projects/team{path}", body, format="json")
        expected = {"admin": (200, 201, 204, 404), "nobody": (404,)}.get(role, (403,))
        assert response.status_code in expected, (method, path, response.content)
    for path in ("/invitations", "/variables"):
        assert client.get(f"/api/v1/projects/team{path}").status_code == {"admin": 200, "nobody": 404}.get(role, 403)
    assert client.get("/api/v1/projects/team/members").status_code == (404 if role == "nobody" else 200)
    if role != "admin":
        assert sorted(Membership.objects.values_list("user__username", "role")) == before
        assert Project.objects.get(name="team").own_slots is None


PAGES = ["quota", "members", "members/remove", "invitations", "invitations/revoke", "variables", "variables/remove"]


@pytest.mark.parametrize("page", PAGES)
def test_only_admins_change_a_project_on_its_page(page: str, members: Members, stranger: User, client: Client) -> None:
    for user, code in ((members["operator"], 403), (stranger, 404)):
        client.force_login(user)
        assert client.post(f"/projects/team/{page}/", {"user": "viewer", "role": "admin"}).status_code == code
    client.force_login(members["operator"])
    assert "<form" not in client.get("/projects/team/").content.decode().split("<main")[1]


def test_admins_set_roles_of_members_and_staff_of_all_users(
    members: Members, owner: User, staff: User, api: Api
) -> None:
    for who, user, code in (("admin", "viewer", 200), ("admin", "owner", 422), ("staff", "owner", 200)):
        client = api(staff if who == "staff" else members[who])
        response = client.put(f"/api/v1/projects/team/members/{user}", {"role": "submitter"}, format="json")
        assert response.status_code == code, response.content
    assert access.get_role(owner, "team") == Role.SUBMITTER
    assert access.get_role(members["viewer"], "team") == Role.SUBMITTER


def test_only_staff_can_find_out_which_accounts_exist(
    members: Members, owner: User, stranger: User, staff: User, api: Api
) -> None:
    User.objects.filter(pk=stranger.pk).update(is_active=False)

    def get_error(who: User, name: str) -> str:
        response = api(who).put(f"/api/v1/projects/team/members/{name}", {"role": "viewer"}, format="json")
        assert response.status_code == 422
        [error] = response.json()["errors"]
        assert error["field"] == "user"
        return str(error["message"])

    for name in ("nobody", "stranger"):
        message = f"No active account is named '{name}'. Check the spelling, or invite the person."
        assert get_error(staff, name) == message
    for name in ("nobody", "stranger", "owner"):
        assert get_error(members["admin"], name) == f"User '{name}' is not a member of project team. Invite this user."


def test_every_member_can_leave(members: Members, api: Api) -> None:
    assert api(members["viewer"]).delete("/api/v1/projects/team/members/viewer").status_code == 204
    assert api(members["viewer"]).get("/api/v1/projects/team").status_code == 404


def test_rejects_removal_of_the_only_admin(members: Members, staff: User, api: Api) -> None:
    admin = api(members["admin"])
    address = "/api/v1/projects/team/members/admin"
    message = "User admin is the only admin of project team. Make another member an admin first."
    for response, field in (
        (admin.delete(address), "user"),
        (admin.put(address, {"role": "operator"}, format="json"), "role"),
    ):
        errors = [(error["field"], error["message"]) for error in response.json()["errors"]]
        assert (response.status_code, errors) == (422, [(field, message)])
    assert access.get_role(members["admin"], "team") == Role.ADMIN
    assert admin.put(address, {"role": "admin"}, format="json").status_code == 200
    second = address.replace("admin", "viewer")
    assert admin.put(second, {"role": "admin"}, format="json").status_code == 200
    User.objects.filter(username="viewer").update(is_active=False)
    assert admin.delete(address).status_code == 422, "a disabled admin does not count"
    User.objects.filter(username="viewer").update(is_active=True)
    assert admin.delete(address).status_code == 204
    assert api(staff).delete(second).status_code == 204, "staff can administer every project"


def test_page_rejects_removal_of_the_only_admin(members: Members, client: Client) -> None:
    client.force_login(members["admin"])
    for path, body in (("members/remove", {}), ("members", {"role": "viewer"})):
        shown = client.post(f"/projects/team/{path}/", {"user": "admin", **body}, follow=True).content.decode()
        assert "User admin is the only admin of project team. Make another member an admin first." in shown
    assert access.get_role(members["admin"], "team") == Role.ADMIN


def test_default_has_no_members(staff: User, owner: User, api: Api) -> None:
    for path, body in (("members/owner", {"role": "admin"}), ("invitations", {"role": "admin"})):
        method = "put" if body and path.startswith("members") else "post"
        response = getattr(api(staff), method)(f"/api/v1/projects/default/{path}", body, format="json")
        assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "project")
    assert not Membership.objects.exists()


def test_admins_can_only_lower_the_quota(members: Members, api: Api) -> None:
    Project.objects.filter(name="team").update(slots=8)
    client = api(members["admin"])
    refused = client.patch("/api/v1/projects/team", {"own_slots": 9}, format="json")
    assert (refused.status_code, refused.json()["errors"][0]["message"]) == (
        422,
        "`own_slots` is 9, but the quota that staff set is 8. Use 8 or less.",
    )
    assert client.patch("/api/v1/projects/team", {"own_slots": 4}, format="json").json()["own_slots"] == 4
    assert Project.objects.get(name="team").max_slots == 4


def test_only_staff_create_projects(owner: User, staff: User, api: Api) -> None:
    assert api(owner).post("/api/v1/projects", {"name": "new"}, format="json").status_code == 403
    assert api(staff).post("/api/v1/projects", {"name": "new", "slots": 4}, format="json").status_code == 201
    again = api(staff).post("/api/v1/projects", {"name": "new"}, format="json")
    assert (again.status_code, again.json()["errors"][0]["field"]) == (422, "name")


def test_page_changes_a_project_like_rest(members: Members, owner: User, client: Client) -> None:
    client.force_login(members["admin"])
    client.post("/projects/team/members/", {"user": "viewer", "role": "operator"})
    client.post("/projects/team/members/remove/", {"user": "colleague"})
    client.post("/projects/team/quota/", {"own_slots": "3"})
    shown = client.post("/projects/team/invitations/", {"role": "submitter", "days": "3", "note": "Ann <b>"})
    link = re.search(r'id="link">http://testserver(/invitations/[?]token=[^<]+)<', shown.content.decode())
    assert link is not None
    assert "Ann &lt;b&gt;" in client.get("/projects/team/").content.decode()
    assert Project.objects.get(name="team").own_slots == 3
    assert access.get_role(members["viewer"], "team") == Role.OPERATOR
    assert access.get_role(members["colleague"], "team") is None
    for posted, message in (
        ({"own_slots": "many"}, "<code>own_slots</code>"),
        ({"own_slots": "-1"}, "<code>own_slots</code>"),
    ):
        assert message in client.post("/projects/team/quota/", posted, follow=True).content.decode()
    client.force_login(owner)
    assert client.post(link[1], follow=True).redirect_chain == [("/projects/team/", 302)]
    assert client.get(link[1]).status_code == 404
    assert "Your role is submitter" in client.get("/projects/team/").content.decode()


def test_rejects_deletion_of_a_project_with_jobs(
    members: Members, team: Project, client: Client, make_job: Callable[..., Job]
) -> None:
    client.force_login(User.objects.create_superuser("root"))
    make_job(members["submitter"])
    assert client.post(f"/admin/jobs/project/{team.pk}/delete/", {"post": "yes"}).status_code == 403
    client.post("/admin/jobs/project/", {"action": "delete_selected", "_selected_action": [team.pk], "post": "yes"})
    assert Project.objects.filter(pk=team.pk).exists()
    Job.objects.all().delete()
    assert client.post(f"/admin/jobs/project/{team.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not Project.objects.filter(pk=team.pk).exists()


@pytest.mark.parametrize("interface", ["page", "REST"])
def test_new_project_has_no_rows_of_a_deleted_one(
    interface: str, members: Members, team: Project, staff: User, api: Api, client: Client
) -> None:
    """Old baselines and webhooks can contain secrets that new members must not see."""
    other = BaselineRun.objects.create(project="other", branch="main", job="j", name="run", facts={}, by="ann")

    def create_rows() -> None:
        BaselineRun.objects.create(project="team", branch="main", job="j", name="run", facts={}, by="ann")
        Webhook.objects.create(project="team", owner=members["admin"], name="w", url="https://example.com/secret")
        MailWish.objects.create(project="team", user=members["admin"])

    def count_rows() -> list[int]:
        return [kind.objects.filter(project="team").count() for kind in (BaselineRun, Webhook, MailWish)]

    client.force_login(User.objects.create_superuser("root"))
    create_rows()
    assert client.post(f"/admin/jobs/project/{team.pk}/delete/", {"post": "yes"}).status_code == 302
    assert count_rows() == [0, 0, 0]
    create_rows()  # Rows that an older version did not delete.
    if interface == "REST":
        assert api(staff).post("/api/v1/projects", {"name": "team"}, format="json").status_code == 201
    else:
        assert client.post("/admin/jobs/project/add/", {"name": "team", "weight": "1"}).status_code == 302
    assert count_rows() == [0, 0, 0]
    assert BaselineRun.objects.get() == other


def test_rejects_the_name_of_a_deleted_project_with_jobs(
    members: Members, team: Project, staff: User, api: Api, client: Client, make_job: Callable[..., Job]
) -> None:
    """Members of a new project must not see jobs that were submitted while the old one was deleted."""
    make_job(members["submitter"])
    Project.objects.filter(pk=team.pk).delete()
    response = api(staff).post("/api/v1/projects", {"name": "team"}, format="json")
    assert response.status_code == 422
    assert "Jobs of a deleted project with the same name still exist." in response.json()["errors"][0]["message"]
    client.force_login(User.objects.create_superuser("root"))
    page = client.post("/admin/jobs/project/add/", {"name": "team", "weight": "1"})
    assert "Jobs of a deleted project with the same name still exist." in page.content.decode()
    assert not Project.objects.filter(name="team").exists()


def test_hides_projects_from_other_users(team: Project, stranger: User, api: Api, client: Client) -> None:
    assert [row["name"] for row in api(stranger).get("/api/v1/projects").json()] == ["default"]
    client.force_login(stranger)
    assert "team" not in client.get("/projects/").content.decode().split("<main")[1].replace("team.", "")
    assert client.get("/projects/team/").status_code == 404


def test_pages_and_searches_200_projects_and_members(members: Members, client: Client) -> None:
    Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(200))
    people = User.objects.bulk_create(User(username=f"person-{n:03}", password="!") for n in range(200))
    team = Project.objects.get(name="team")
    Membership.objects.bulk_create(Membership(project=team, user=one, role=Role.VIEWER) for one in people)
    User.objects.filter(pk=members["admin"].pk).update(is_staff=True)
    client.force_login(members["admin"])
    with CaptureQueriesContext(connection) as queries:
        page = client.get("/projects/?page=2").content.decode()
    assert len(queries) < 15, "the number of queries does not depend on the rows"
    assert "51 to 100 of 20" in page
    assert 'href="/projects/?page=3"' in page
    rows = client.get("/projects/?q=mission-15").context["rows"]
    assert [row["project"].name for row in rows] == [f"mission-{n}" for n in range(150, 160)]
    assert "No project matches" in client.get("/projects/?q=absent%00").content.decode()
    shown = client.get("/projects/team/?q=person-15").content.decode()
    assert (shown.count('data-label="Role"'), "person-150" in shown) == (10, True)
    assert client.get("/projects/team/").content.decode().count('data-label="Role"') == 50
    assert "No member matches." in client.get("/projects/team/?q=absent").content.decode()


def test_queue_page_lists_waiting_projects_first(staff: User, client: Client) -> None:
    Project.objects.bulk_create(Project(name=f"mission-{n:03}", used=float(n)) for n in range(120))
    actions.submit(staff, {**GOOD, "project": "mission-007"})
    client.force_login(staff)
    page = client.get("/queue/")
    first = [line["project"].name for line in page.context["projects"]]
    assert (first[:2], len(first)) == (["mission-007", "mission-119"], 50)
    assert 'href="/queue/?projects=2"' in page.content.decode()


def test_rest_lists_projects_with_few_queries(members: Members, api: Api) -> None:
    projects = Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(60))
    Membership.objects.bulk_create(
        Membership(user=members["viewer"], project=one, role=Role.VIEWER) for one in projects
    )
    with CaptureQueriesContext(connection) as queries:
        projects_of_viewer = api(members["viewer"]).get("/api/v1/projects").json()
    assert [one["role"] for one in projects_of_viewer].count("viewer") == 61
    assert len(queries) < 15
