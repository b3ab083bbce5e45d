"""Invitation links, which add a user to a project and can create the account."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from email.message import EmailMessage
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.test import Client
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.core import access
from jobs.models import AuditEntry, Invitation, Membership, Project, Role
from jobs.people import invitations
from jobs.people.invitations import AccountForm, InvitationRequest, create_account, create_invitation, find_invitation
from tests.jobs.conftest import run_together
from tests.webapp.test_public_routes import PUBLIC
from webapp.runner import find_free_port

Api = Callable[[User | None], APIClient]
Members = dict[str, User]
ANN = {"username": "ann", "password1": "quite-a-secret-1", "password2": "quite-a-secret-1"}


def ensure_admin(team: Project) -> str:
    """Return the name of a project admin, and create the account if it is missing."""
    admin, _ = User.objects.get_or_create(username="admin")
    Membership.objects.get_or_create(project=team, user=admin, defaults={"role": Role.ADMIN})
    return admin.get_username()


def get_invited_users() -> QuerySet[User]:
    """Return all users except the inviting admin."""
    return User.objects.exclude(username="admin")


def make_link(team: Project, **wish: Any) -> str:
    """Create an invitation and return the path of its link."""
    request = InvitationRequest(**{"role": "submitter", **wish})
    return f"/invitations/?token={create_invitation(team, request, ensure_admin(team))[1]}"


def test_link_creates_an_account_once(team: Project, client: Client) -> None:
    path = make_link(team, email="ann@acme.example")
    page = client.get(path)
    assert (page.status_code, page.headers["Referrer-Policy"]) == (200, "strict-origin")
    assert "no-store" in page.headers["Cache-Control"]
    assert "ann@acme.example" in page.content.decode()
    assert f"/login/?next={path.replace('/', '%2F').replace('?', '%3F').replace('=', '%3D')}" in page.content.decode()
    assert not get_invited_users().exists(), "viewing the link creates no account"
    assert client.post(path, ANN).headers["Location"] == "/projects/team/"
    user = get_invited_users().get()
    assert (user.username, user.email, user.is_staff, user.is_superuser) == ("ann", "ann@acme.example", False, False)
    assert user.check_password(ANN["password1"])
    assert access.get_role(user, "team") == Role.SUBMITTER
    assert "with the role submitter" in client.get("/projects/team/").content.decode(), "the new user is logged in"
    entries = AuditEntry.objects.order_by("id").values_list("who", "what", "kind", "name")
    assert [*entries][1:] == [("ann", "make account", "user", "ann"), ("ann", "join", "project", "team")]
    assert ANN["password1"] not in str([*AuditEntry.objects.values(), *User.objects.values()])
    other = Client().post(path, {**ANN, "username": "bob"})
    assert (other.status_code, "was used" in other.content.decode()) == (404, True)
    assert get_invited_users().count() == 1


def test_page_describes_the_rights_of_the_role(team: Project, client: Client) -> None:
    submits = "All members can see the jobs that you submit to the project."
    pages = {role: client.get(make_link(team, role=role)).content.decode() for role in ("viewer", "submitter")}
    assert (submits in pages["submitter"], submits in pages["viewer"]) == (True, False)
    assert "You can see the jobs of all members, but not submit jobs." in pages["viewer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"password1": "short", "password2": "short"}, "at least 8 characters"),
        ({"password1": "password123", "password2": "password123"}, "too common"),
        ({"password2": "quite-a-secret-2"}, "match"),
        ({"username": "owner"}, "already exists"),
        ({"username": "OWNER"}, "already exists"),
        ({"username": "a b<i>"}, "letters (a to z)"),
        ({"username": ""}, "required"),
        ({"username": "\u0430dmin"}, "letters (a to z)"),
        ({"username": "@SUM"}, "letters (a to z)"),
        ({"username": ".ann"}, "letters (a to z)"),
        ({"username": "ann+1"}, "letters (a to z)"),
        ({"username": "a\x00b"}, "Null characters"),
    ],
)
def test_rejects_invalid_names_and_passwords(
    change: dict[str, str], message: str, team: Project, owner: User, client: Client
) -> None:
    path = make_link(team)
    response = client.post(path, {**ANN, **change})
    assert (response.status_code, message in response.content.decode()) == (422, True), response.content.decode()
    assert "<i>" not in response.content.decode()
    assert [*get_invited_users()] == [owner]
    assert client.post(path, ANN).status_code == 302, "the link is still valid"


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ({"expires": timezone.now() - timedelta(seconds=1)}, "This invitation expired at"),
        ({"revoked": timezone.now()}, "was revoked"),
        ({"accepted": timezone.now()}, "was used"),
        ({"hash": "0" * 64}, "The invitation does not exist."),
    ],
)
def test_shows_why_a_link_is_invalid(
    end: dict[str, Any], message: str, team: Project, owner: User, client: Client
) -> None:
    path = make_link(team)
    Invitation.objects.update(**end)
    for _ in range(2):
        for response in (client.get(path), client.post(path, ANN)):
            assert (response.status_code, message in response.content.decode()) == (404, True), (
                response.content.decode()
            )
        client.force_login(owner)
    assert [*get_invited_users()] == [owner]
    assert not Membership.objects.filter(user=owner).exists()


def test_link_for_an_address_is_valid_for_that_address_only(
    team: Project, owner: User, api: Api, client: Client
) -> None:
    path = make_link(team, email="Owner@acme.example")
    client.force_login(owner)
    for response in (client.get(path), client.post(path)):
        assert (response.status_code, "is not for the mail address of user" in response.content.decode()) == (404, True)
    rest = api(owner)
    token = {"token": path.partition("=")[2]}
    assert rest.post("/api/v1/invitations/accept", token, format="json").status_code == 409
    User.objects.filter(pk=owner.pk).update(email="owner@ACME.example")
    second = Client().post(path, ANN)
    assert (second.status_code, "Log in to this account." in second.content.decode()) == (422, True), (
        "an account with this address exists"
    )
    assert rest.post("/api/v1/invitations/accept", token, format="json").status_code == 200
    assert access.get_role(owner, "team") == Role.SUBMITTER


@pytest.mark.parametrize("address", ["ann", "ann@", "a b@acme.example", "ann@b.example\x00", f"{'a' * 250}@b.example"])
def test_rejects_invalid_mail_addresses(address: str, members: Members, api: Api, client: Client) -> None:
    rest = api(members["admin"])
    refused = rest.post("/api/v1/projects/team/invitations", {"role": "viewer", "email": address}, format="json")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "email")
    client.force_login(members["admin"])
    posted = {"role": "viewer", "days": "7", "email": address}
    assert "<code>email</code>" in client.post("/projects/team/invitations/", posted, follow=True).content.decode()
    assert not Invitation.objects.exists()


def test_limits_the_rate_of_requests_to_a_link(team: Project, client: Client, settings: Any) -> None:
    settings.LOGINS_PER_MINUTE = 3
    path = make_link(team)
    codes = [client.post(path, {}).status_code for _ in range(7)]  # A new minute can start between two requests.
    assert codes[:3] == [422] * 3
    assert 429 in codes[3:]


def test_registration_needs_a_link(team: Project, client: Client) -> None:
    with pytest.raises(NoReverseMatch):
        reverse("account_signup")
    fields = {**ANN, "email": "ann@acme.example", "password": ANN["password1"]}
    for path in ["/invitations/?token=mbi_x", *(f"/{path}" for path in PUBLIC), "/signup/", "/account/signup/"]:
        client.post(path, fields)
    assert not get_invited_users().exists()


@pytest.mark.usefixtures("each_database")
def test_one_of_several_concurrent_users_of_a_link_joins() -> None:
    team, old = Project.objects.create(name="team"), User.objects.create_user("old")
    for number in range(4):
        path, people = make_link(team), {f"p{number}-{who}": Client() for who in range(4)}
        people[f"p{number}-0"].force_login(old)
        answers: list[int] = []

        def follow(who: str, client: Client, path: str = path, answers: list[int] = answers) -> None:
            answers.append(client.post(path, {**ANN, "username": who}).status_code)

        before = User.objects.count() + AuditEntry.objects.filter(who="old", what="join").count()
        run_together([partial(follow, who, client) for who, client in people.items()])
        assert sorted(answers) == [302, 404, 404, 404]
        now = User.objects.count() + AuditEntry.objects.filter(who="old", what="join").count()
        assert now == before + 1, "one user joins, and the other requests leave no rows"


@pytest.mark.usefixtures("each_database")
def test_concurrent_accounts_with_one_name_use_one_link() -> None:
    team = Project.objects.create(name="team")
    texts = [create_invitation(team, InvitationRequest(role="viewer"), ensure_admin(team))[1] for _ in range(2)]
    forms = [AccountForm(find_invitation(text), ANN) for text in texts]
    assert all(form.is_valid() for form in forms)
    users: list[User | None] = []
    pairs = zip(forms, map(find_invitation, texts), strict=True)
    run_together([lambda form=form, found=found: users.append(create_account(form, found)) for form, found in pairs])
    assert (len([user for user in users if user]), get_invited_users().count(), Membership.objects.count()) == (1, 1, 2)
    assert Invitation.objects.filter(accepted=None).count() == 1
    assert [form.errors.get("username") for form in forms].count(["A user with that username already exists."]) == 1


def test_mails_an_invitation_and_reports_the_result(
    team: Project, members: Members, api: Api, inbox: list[EmailMessage], monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    def invite(**wish: Any) -> Any:
        body = {"role": "viewer", "days": 3, **wish}
        return api(members["admin"]).post("/api/v1/projects/team/invitations", body, format="json").json()

    assert invite()["mailed"] is None, "no mail without an address"
    invitation = invite(email="ann@acme.example")
    assert invitation["mailed"] == "The invitation was mailed to ann@acme.example."
    (mail,) = inbox
    assert (mail["To"], mail["Subject"]) == ("ann@acme.example", "Invitation to project team")
    assert f"https://board.example/invitations/?token={invitation['token']}" in mail.get_content().splitlines()
    monkeypatch.setattr(invitations, "MAX_INVITATIONS_PER_HOUR", 1)
    assert "has reached the limit of 1 invitations per hour" in invite(email="bob@acme.example")["mailed"]
    monkeypatch.undo()
    settings.EMAIL_PORT = find_free_port()
    assert (
        "The invitation was not mailed to bob@acme.example. ConnectionRefusedError"
        in invite(email="bob@acme.example")["mailed"]
    )
    assert len(inbox) == 1


def test_links_to_the_login_if_new_accounts_are_disabled(team: Project, client: Client, settings: Any) -> None:
    settings.INVITED_PEOPLE = False
    path = make_link(team)
    page = client.get(path).content.decode()
    assert "Log in to your account to accept the invitation." in page
    assert "/login/?next=%2Finvitations%2F" in page
    assert "password1" not in page
    client.post(path, ANN)
    assert not get_invited_users().exists()


@pytest.mark.parametrize("change", ["removed", "demoted", "disabled", "deleted"])
def test_link_is_invalid_after_its_admin_lost_the_right(
    team: Project, members: Members, client: Client, change: str
) -> None:
    """The link of an admin cannot restore the rights of the admin."""
    admin = members["admin"]
    path = f"/invitations/?token={create_invitation(team, InvitationRequest(role='admin'), admin.get_username())[1]}"
    assert client.get(path).status_code == 200
    if change == "disabled":
        User.objects.filter(pk=admin.pk).update(is_active=False)
    elif change == "deleted":
        admin.delete()
    else:
        membership = Membership.objects.filter(user=admin, project=team)
        membership.delete() if change == "removed" else membership.update(role=Role.VIEWER)
    response = client.post(path, ANN)
    assert (response.status_code, "is no longer a project admin" in response.content.decode()) == (404, True)


@pytest.mark.parametrize("host", ["", "mail.example.com"])
def test_fields_of_emails_appear_only_with_a_mail_server(client: Client, db: None, settings: Any, host: str) -> None:
    settings.EMAIL_HOST = host
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    Project.objects.create(name="team")
    account = client.get("/account/").content.decode()
    project = client.get("/projects/team/").content.decode()
    assert ("Email address" in account) == ("invite-email" in project) == bool(host)
    assert "Create invitation" in project
