"""Members, invitations and quota: over REST and on the pages, and what is written down of it."""

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


def test_an_invitation_is_shown_once_kept_as_a_hash_and_good_for_one(
    members: Members, owner: User, stranger: User, api: Api, client: Client
) -> None:
    made = api(members["admin"]).post(
        "/api/v1/projects/team/invitations", {"role": "operator", "note": "Ann"}, format="json"
    )
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    token, url = made.json()["token"], made.json()["url"]
    assert token not in api(members["admin"]).get("/api/v1/projects/team/invitations").content.decode()
    assert token not in str([*Invitation.objects.values(), *AuditEntry.objects.values()])
    client.force_login(owner)
    page = client.get(url)
    assert "Join team?" in page.content.decode()
    assert access.get_role(owner, "team") is None, "looking is not joining"
    assert client.post(url).status_code == 302
    assert access.get_role(owner, "team") == Role.OPERATOR
    second = api(stranger).post("/api/v1/invitations/accept", {"token": token}, format="json")
    assert (second.status_code, second.json()["errors"][0]["field"]) == (409, "token")
    assert access.get_role(stranger, "team") is None
    told = [(entry.who, entry.what) for entry in AuditEntry.objects.filter(kind="project", name="team")]
    assert told == [("owner", "join"), ("admin", "invite")]


@pytest.mark.parametrize("end", ["expires", "revoked"])
def test_an_invitation_that_is_over_makes_nobody_a_member(end: str, members: Members, owner: User, api: Api) -> None:
    rest = api(members["admin"])
    made = rest.post("/api/v1/projects/team/invitations", {"role": "viewer"}, format="json").json()
    if end == "expires":
        Invitation.objects.update(expires=timezone.now() - timedelta(seconds=1))
    else:
        assert rest.delete(f"/api/v1/projects/team/invitations/{made['id']}").status_code == 204
    assert api(owner).post("/api/v1/invitations/accept", {"token": made["token"]}, format="json").status_code == 409
    assert access.get_role(owner, "team") is None


def test_an_invitation_takes_nothing_from_who_has_more(members: Members, api: Api) -> None:
    made = api(members["admin"]).post("/api/v1/projects/team/invitations", {"role": "viewer"}, format="json").json()
    api(members["operator"]).post("/api/v1/invitations/accept", {"token": made["token"]}, format="json")
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
    rest = api(members.get(role, stranger))
    before = sorted(Membership.objects.values_list("user__username", "role"))
    for method, path, body in WRITES:
        if (role, path) == ("viewer", "/members/viewer") and method == "delete":
            continue  # anybody may leave
        answer = getattr(rest, method)(f"/api/v1/projects/team{path}", body, format="json")
        expected = {"admin": (200, 201, 204, 404), "nobody": (404,)}.get(role, (403,))
        assert answer.status_code in expected, (method, path, answer.content)
    for path in ("/invitations", "/variables"):
        assert rest.get(f"/api/v1/projects/team{path}").status_code == {"admin": 200, "nobody": 404}.get(role, 403)
    assert rest.get("/api/v1/projects/team/members").status_code == (404 if role == "nobody" else 200)
    if role != "admin":
        assert sorted(Membership.objects.values_list("user__username", "role")) == before
        assert Project.objects.get(name="team").own_slots is None


PAGES = ["quota", "members", "members/remove", "invitations", "invitations/revoke", "variables", "variables/remove"]


@pytest.mark.parametrize("page", PAGES)
def test_nor_on_its_page(page: str, members: Members, stranger: User, client: Client) -> None:
    for user, code in ((members["operator"], 403), (stranger, 404)):
        client.force_login(user)
        assert client.post(f"/projects/team/{page}/", {"user": "viewer", "role": "admin"}).status_code == code
    client.force_login(members["operator"])
    assert "<form" not in client.get("/projects/team/").content.decode().split("<main")[1]


def test_admins_give_roles_to_members_and_staff_to_anybody(
    members: Members, owner: User, staff: User, api: Api
) -> None:
    for who, user, code in (("admin", "viewer", 200), ("admin", "owner", 422), ("staff", "owner", 200)):
        rest = api(staff if who == "staff" else members[who])
        answer = rest.put(f"/api/v1/projects/team/members/{user}", {"role": "submitter"}, format="json")
        assert answer.status_code == code, answer.content
    assert access.get_role(owner, "team") == Role.SUBMITTER
    assert access.get_role(members["viewer"], "team") == Role.SUBMITTER


def test_that_there_is_no_such_account_only_staff_learn(
    members: Members, owner: User, stranger: User, staff: User, api: Api
) -> None:
    User.objects.filter(pk=stranger.pk).update(is_active=False)

    def told(who: User, name: str) -> str:
        answer = api(who).put(f"/api/v1/projects/team/members/{name}", {"role": "viewer"}, format="json")
        assert answer.status_code == 422
        [error] = answer.json()["errors"]
        assert error["field"] == "user"
        return str(error["message"])

    for name in ("nobody", "stranger"):
        words = f"No active account is named '{name}'. Check the spelling, or invite the person."
        assert told(staff, name) == words
    for name in ("nobody", "stranger", "owner"):
        assert told(members["admin"], name) == f"User '{name}' is not a member of project team. Invite this user."


def test_anybody_leaves(members: Members, api: Api) -> None:
    assert api(members["viewer"]).delete("/api/v1/projects/team/members/viewer").status_code == 204
    assert api(members["viewer"]).get("/api/v1/projects/team").status_code == 404


def test_the_only_admin_stays_one_until_somebody_else_is(members: Members, staff: User, api: Api) -> None:
    admin = api(members["admin"])
    address = "/api/v1/projects/team/members/admin"
    words = "User admin is the only admin of project team. Make another member an admin first."
    for answer, field in (
        (admin.delete(address), "user"),
        (admin.put(address, {"role": "operator"}, format="json"), "role"),
    ):
        told = [(error["field"], error["message"]) for error in answer.json()["errors"]]
        assert (answer.status_code, told) == (422, [(field, words)])
    assert access.get_role(members["admin"], "team") == Role.ADMIN
    assert admin.put(address, {"role": "admin"}, format="json").status_code == 200
    second = address.replace("admin", "viewer")
    assert admin.put(second, {"role": "admin"}, format="json").status_code == 200
    User.objects.filter(username="viewer").update(is_active=False)
    assert admin.delete(address).status_code == 422, "who cannot log in runs nothing"
    User.objects.filter(username="viewer").update(is_active=True)
    assert admin.delete(address).status_code == 204
    assert api(staff).delete(second).status_code == 204, "staff run it themselves"


def test_nor_does_the_page_leave_a_project_without_an_admin(members: Members, client: Client) -> None:
    client.force_login(members["admin"])
    for path, body in (("members/remove", {}), ("members", {"role": "viewer"})):
        shown = client.post(f"/projects/team/{path}/", {"user": "admin", **body}, follow=True).content.decode()
        assert "User admin is the only admin of project team. Make another member an admin first." in shown
    assert access.get_role(members["admin"], "team") == Role.ADMIN


def test_default_has_no_members(staff: User, owner: User, api: Api) -> None:
    for path, body in (("members/owner", {"role": "admin"}), ("invitations", {"role": "admin"})):
        method = "put" if body and path.startswith("members") else "post"
        answer = getattr(api(staff), method)(f"/api/v1/projects/default/{path}", body, format="json")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "project")
    assert not Membership.objects.exists()


def test_admins_keep_a_project_within_what_staff_gave(members: Members, api: Api) -> None:
    Project.objects.filter(name="team").update(slots=8)
    rest = api(members["admin"])
    refused = rest.patch("/api/v1/projects/team", {"own_slots": 9}, format="json")
    assert (refused.status_code, refused.json()["errors"][0]["message"]) == (
        422,
        "`own_slots` is 9, but the quota that staff set is 8. Use 8 or less.",
    )
    assert rest.patch("/api/v1/projects/team", {"own_slots": 4}, format="json").json()["own_slots"] == 4
    assert Project.objects.get(name="team").max_slots == 4


def test_only_staff_make_projects(owner: User, staff: User, api: Api) -> None:
    assert api(owner).post("/api/v1/projects", {"name": "new"}, format="json").status_code == 403
    assert api(staff).post("/api/v1/projects", {"name": "new", "slots": 4}, format="json").status_code == 201
    again = api(staff).post("/api/v1/projects", {"name": "new"}, format="json")
    assert (again.status_code, again.json()["errors"][0]["field"]) == (422, "name")


def test_the_page_does_what_rest_does(members: Members, owner: User, client: Client) -> None:
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
    for posted, words in (
        ({"own_slots": "many"}, "<code>own_slots</code>"),
        ({"own_slots": "-1"}, "<code>own_slots</code>"),
    ):
        assert words in client.post("/projects/team/quota/", posted, follow=True).content.decode()
    client.force_login(owner)
    assert client.post(link[1], follow=True).redirect_chain == [("/projects/team/", 302)]
    assert client.get(link[1]).status_code == 404
    assert "Your role is submitter" in client.get("/projects/team/").content.decode()


def test_a_project_that_has_jobs_stays(
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


@pytest.mark.parametrize("way", ["page", "REST"])
def test_a_project_made_anew_has_nothing_of_the_one_before(
    way: str, members: Members, team: Project, staff: User, api: Api, client: Client
) -> None:
    """Its members read the baselines of others, and its admins their webhooks, whose addresses hold secrets."""
    other = BaselineRun.objects.create(project="other", branch="main", job="j", name="run", facts={}, by="ann")

    def leave() -> None:
        BaselineRun.objects.create(project="team", branch="main", job="j", name="run", facts={}, by="ann")
        Webhook.objects.create(project="team", owner=members["admin"], name="w", url="https://example.com/secret")
        MailWish.objects.create(project="team", user=members["admin"])

    def left() -> list[int]:
        return [kind.objects.filter(project="team").count() for kind in (BaselineRun, Webhook, MailWish)]

    client.force_login(User.objects.create_superuser("root"))
    leave()
    assert client.post(f"/admin/jobs/project/{team.pk}/delete/", {"post": "yes"}).status_code == 302
    assert left() == [0, 0, 0]
    leave()  # by a board that did not do so yet
    if way == "REST":
        assert api(staff).post("/api/v1/projects", {"name": "team"}, format="json").status_code == 201
    else:
        assert client.post("/admin/jobs/project/add/", {"name": "team", "weight": "1"}).status_code == 302
    assert left() == [0, 0, 0]
    assert BaselineRun.objects.get() == other


def test_a_name_that_jobs_of_a_deleted_project_bear_is_taken(
    members: Members, team: Project, staff: User, api: Api, client: Client, make_job: Callable[..., Job]
) -> None:
    """A job that was submitted while staff deleted its project; or its new members would see it."""
    make_job(members["submitter"])
    Project.objects.filter(pk=team.pk).delete()
    answer = api(staff).post("/api/v1/projects", {"name": "team"}, format="json")
    assert answer.status_code == 422
    assert "Jobs of a deleted project with the same name still exist." in answer.json()["errors"][0]["message"]
    client.force_login(User.objects.create_superuser("root"))
    page = client.post("/admin/jobs/project/add/", {"name": "team", "weight": "1"})
    assert "Jobs of a deleted project with the same name still exist." in page.content.decode()
    assert not Project.objects.filter(name="team").exists()


def test_a_stranger_learns_of_no_project(team: Project, stranger: User, api: Api, client: Client) -> None:
    assert [row["name"] for row in api(stranger).get("/api/v1/projects").json()] == ["default"]
    client.force_login(stranger)
    assert "team" not in client.get("/projects/").content.decode().split("<main")[1].replace("team.", "")
    assert client.get("/projects/team/").status_code == 404


def test_two_hundred_projects_and_members_come_in_pages_and_are_found_by_name(members: Members, client: Client) -> None:
    Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(200))
    people = User.objects.bulk_create(User(username=f"person-{n:03}", password="!") for n in range(200))
    team = Project.objects.get(name="team")
    Membership.objects.bulk_create(Membership(project=team, user=one, role=Role.VIEWER) for one in people)
    User.objects.filter(pk=members["admin"].pk).update(is_staff=True)
    client.force_login(members["admin"])
    with CaptureQueriesContext(connection) as asked:
        page = client.get("/projects/?page=2").content.decode()
    assert len(asked) < 15, "no query a line"
    assert "51 to 100 of 20" in page
    assert 'href="/projects/?page=3"' in page
    found = client.get("/projects/?q=mission-15").context["rows"]
    assert [row["project"].name for row in found] == [f"mission-{n}" for n in range(150, 160)]
    assert "No project matches" in client.get("/projects/?q=absent%00").content.decode()
    shown = client.get("/projects/team/?q=person-15").content.decode()
    assert (shown.count('data-label="Role"'), "person-150" in shown) == (10, True)
    assert client.get("/projects/team/").content.decode().count('data-label="Role"') == 50
    assert "No member matches." in client.get("/projects/team/?q=absent").content.decode()


def test_the_queue_s_page_has_a_page_of_projects_those_that_wait_first(staff: User, client: Client) -> None:
    Project.objects.bulk_create(Project(name=f"mission-{n:03}", used=float(n)) for n in range(120))
    actions.submit(staff, {**GOOD, "project": "mission-007"})
    client.force_login(staff)
    page = client.get("/queue/")
    first = [line["project"].name for line in page.context["projects"]]
    assert (first[:2], len(first)) == (["mission-007", "mission-119"], 50)
    assert 'href="/queue/?projects=2"' in page.content.decode()


def test_rest_asks_for_no_role_by_itself(members: Members, api: Api) -> None:
    projects = Project.objects.bulk_create(Project(name=f"mission-{n:03}") for n in range(60))
    Membership.objects.bulk_create(
        Membership(user=members["viewer"], project=one, role=Role.VIEWER) for one in projects
    )
    with CaptureQueriesContext(connection) as asked:
        told = api(members["viewer"]).get("/api/v1/projects").json()
    assert [one["role"] for one in told].count("viewer") == 61
    assert len(asked) < 15
