"""What an invitation's link makes: a member of who has an account, an account for who has none; once, for no other."""

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
from tests.webapp.test_public import PUBLIC
from webapp.runner import find_free_port

Api = Callable[[User | None], APIClient]
Members = dict[str, User]
ANN = {"username": "ann", "password1": "quite-a-secret-1", "password2": "quite-a-secret-1"}


def admin_of(team: Project) -> str:
    """Whoever invites is an admin with an account."""
    admin, _ = User.objects.get_or_create(username="admin")
    Membership.objects.get_or_create(project=team, user=admin, defaults={"role": Role.ADMIN})
    return admin.get_username()


def invited() -> QuerySet[User]:
    """All but that admin."""
    return User.objects.exclude(username="admin")


def link(team: Project, **wish: Any) -> str:
    """A path that somebody was sent."""
    asked = InvitationRequest(**{"role": "submitter", **wish})
    return f"/invitations/?token={create_invitation(team, asked, admin_of(team))[1]}"


def test_who_has_no_account_gets_one_with_the_link(team: Project, client: Client) -> None:
    path = link(team, email="ann@acme.example")
    page = client.get(path)
    assert (page.status_code, page.headers["Referrer-Policy"]) == (200, "strict-origin")
    assert "no-store" in page.headers["Cache-Control"]
    assert "ann@acme.example" in page.content.decode()
    assert f"/login/?next={path.replace('/', '%2F').replace('?', '%3F').replace('=', '%3D')}" in page.content.decode()
    assert not invited().exists(), "looking makes nobody"
    assert client.post(path, ANN).headers["Location"] == "/projects/team/"
    made = invited().get()
    assert (made.username, made.email, made.is_staff, made.is_superuser) == ("ann", "ann@acme.example", False, False)
    assert made.check_password(ANN["password1"])
    assert access.get_role(made, "team") == Role.SUBMITTER
    assert "with the role submitter" in client.get("/projects/team/").content.decode(), "logged in"
    written = AuditEntry.objects.order_by("id").values_list("who", "what", "kind", "name")
    assert [*written][1:] == [("ann", "make account", "user", "ann"), ("ann", "join", "project", "team")]
    assert ANN["password1"] not in str([*AuditEntry.objects.values(), *User.objects.values()])
    other = Client().post(path, {**ANN, "username": "bob"})
    assert (other.status_code, "was used" in other.content.decode()) == (404, True)
    assert invited().count() == 1


def test_a_viewer_is_told_of_no_jobs_that_they_cannot_submit(team: Project, client: Client) -> None:
    submits = "All members can see the jobs that you submit to the project."
    pages = {role: client.get(link(team, role=role)).content.decode() for role in ("viewer", "submitter")}
    assert (submits in pages["submitter"], submits in pages["viewer"]) == (True, False)
    assert "You can see the jobs of all members, but not submit jobs." in pages["viewer"]


@pytest.mark.parametrize(
    ("given", "words"),
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
def test_what_is_no_name_or_password_makes_nobody(
    given: dict[str, str], words: str, team: Project, owner: User, client: Client
) -> None:
    path = link(team)
    refused = client.post(path, {**ANN, **given})
    assert (refused.status_code, words in refused.content.decode()) == (422, True), refused.content.decode()
    assert "<i>" not in refused.content.decode()
    assert [*invited()] == [owner]
    assert client.post(path, ANN).status_code == 302, "the link is as good as it was"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"expires": timezone.now() - timedelta(seconds=1)}, "This invitation expired at"),
        ({"revoked": timezone.now()}, "was revoked"),
        ({"accepted": timezone.now()}, "was used"),
        ({"hash": "0" * 64}, "The invitation does not exist."),
    ],
)
def test_a_link_that_is_over_says_so_to_everybody(
    end: dict[str, Any], words: str, team: Project, owner: User, client: Client
) -> None:
    path = link(team)
    Invitation.objects.update(**end)
    for _ in range(2):
        for answer in (client.get(path), client.post(path, ANN)):
            assert (answer.status_code, words in answer.content.decode()) == (404, True), answer.content.decode()
        client.force_login(owner)
    assert [*invited()] == [owner]
    assert not Membership.objects.filter(user=owner).exists()


def test_a_link_for_a_mail_address_is_nobody_else_s(team: Project, owner: User, api: Api, client: Client) -> None:
    path = link(team, email="Owner@acme.example")
    client.force_login(owner)
    for answer in (client.get(path), client.post(path)):
        assert (answer.status_code, "is not for the mail address of user" in answer.content.decode()) == (404, True)
    rest = api(owner)
    token = {"token": path.partition("=")[2]}
    assert rest.post("/api/v1/invitations/accept", token, format="json").status_code == 409
    User.objects.filter(pk=owner.pk).update(email="owner@ACME.example")
    second = Client().post(path, ANN)
    assert (second.status_code, "Log in to this account." in second.content.decode()) == (422, True), (
        "the address has an account"
    )
    assert rest.post("/api/v1/invitations/accept", token, format="json").status_code == 200
    assert access.get_role(owner, "team") == Role.SUBMITTER


@pytest.mark.parametrize("address", ["ann", "ann@", "a b@acme.example", "ann@b.example\x00", f"{'a' * 250}@b.example"])
def test_what_is_no_mail_address_is_refused(address: str, members: Members, api: Api, client: Client) -> None:
    rest = api(members["admin"])
    refused = rest.post("/api/v1/projects/team/invitations", {"role": "viewer", "email": address}, format="json")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "email")
    client.force_login(members["admin"])
    posted = {"role": "viewer", "days": "7", "email": address}
    assert "<code>email</code>" in client.post("/projects/team/invitations/", posted, follow=True).content.decode()
    assert not Invitation.objects.exists()


def test_tries_have_a_rate(team: Project, client: Client, settings: Any) -> None:
    settings.LOGINS_PER_MINUTE = 3
    path = link(team)
    codes = [client.post(path, {}).status_code for _ in range(7)]  # a minute may begin between two of them
    assert codes[:3] == [422] * 3
    assert 429 in codes[3:]


def test_nobody_registers_without_a_link(team: Project, client: Client) -> None:
    with pytest.raises(NoReverseMatch):
        reverse("account_signup")
    fields = {**ANN, "email": "ann@acme.example", "password": ANN["password1"]}
    for path in ["/invitations/?token=mbi_x", *(f"/{path}" for path in PUBLIC), "/signup/", "/account/signup/"]:
        client.post(path, fields)
    assert not invited().exists()


@pytest.mark.usefixtures("each_database")
def test_of_many_with_one_link_one_gets_in() -> None:
    team, old = Project.objects.create(name="team"), User.objects.create_user("old")
    for number in range(4):
        path, people = link(team), {f"p{number}-{who}": Client() for who in range(4)}
        people[f"p{number}-0"].force_login(old)
        answers: list[int] = []

        def follow(who: str, client: Client, path: str = path, answers: list[int] = answers) -> None:
            answers.append(client.post(path, {**ANN, "username": who}).status_code)

        before = User.objects.count() + AuditEntry.objects.filter(who="old", what="join").count()
        run_together([partial(follow, who, client) for who, client in people.items()])
        assert sorted(answers) == [302, 404, 404, 404]
        now = User.objects.count() + AuditEntry.objects.filter(who="old", what="join").count()
        assert now == before + 1, "one, and nothing is left of the others"


@pytest.mark.usefixtures("each_database")
def test_of_two_who_take_one_name_one_has_it_and_the_other_s_link_is_good() -> None:
    team = Project.objects.create(name="team")
    texts = [create_invitation(team, InvitationRequest(role="viewer"), admin_of(team))[1] for _ in range(2)]
    forms = [AccountForm(find_invitation(text), ANN) for text in texts]
    assert all(form.is_valid() for form in forms)
    made: list[User | None] = []
    pairs = zip(forms, map(find_invitation, texts), strict=True)
    run_together([lambda form=form, found=found: made.append(create_account(form, found)) for form, found in pairs])
    assert (len([user for user in made if user]), invited().count(), Membership.objects.count()) == (1, 1, 2)
    assert Invitation.objects.filter(accepted=None).count() == 1
    assert [form.errors.get("username") for form in forms].count(["A user with that username already exists."]) == 1


def test_one_with_a_mail_address_is_mailed_there_and_said_so(
    team: Project, members: Members, api: Api, inbox: list[EmailMessage], monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    def told_of(**wish: Any) -> Any:
        asked = {"role": "viewer", "days": 3, **wish}
        return api(members["admin"]).post("/api/v1/projects/team/invitations", asked, format="json").json()

    assert told_of()["mailed"] is None, "to nobody"
    told = told_of(email="ann@acme.example")
    assert told["mailed"] == "The invitation was mailed to ann@acme.example."
    (mail,) = inbox
    assert (mail["To"], mail["Subject"]) == ("ann@acme.example", "Invitation to project team")
    assert f"https://board.example/invitations/?token={told['token']}" in mail.get_content().splitlines()
    monkeypatch.setattr(invitations, "MAX_INVITATIONS_PER_HOUR", 1)
    assert "has reached the limit of 1 invitations per hour" in told_of(email="bob@acme.example")["mailed"]
    monkeypatch.undo()
    settings.EMAIL_PORT = find_free_port()
    assert (
        "The invitation was not mailed to bob@acme.example. ConnectionRefusedError"
        in told_of(email="bob@acme.example")["mailed"]
    )
    assert len(inbox) == 1


def test_a_board_that_gives_no_accounts_so_sends_to_the_login(team: Project, client: Client, settings: Any) -> None:
    settings.INVITED_PEOPLE = False
    path = link(team)
    page = client.get(path).content.decode()
    assert "Log in to your account to accept the invitation." in page
    assert "/login/?next=%2Finvitations%2F" in page
    assert "password1" not in page
    client.post(path, ANN)
    assert not invited().exists()


@pytest.mark.parametrize("how", ["removed", "demoted", "disabled", "deleted"])
def test_who_may_no_longer_invite_has_no_open_door_left(
    team: Project, members: Members, client: Client, how: str
) -> None:
    """An admin's own link made them admin again."""
    admin = members["admin"]
    path = f"/invitations/?token={create_invitation(team, InvitationRequest(role='admin'), admin.get_username())[1]}"
    assert client.get(path).status_code == 200
    if how == "disabled":
        User.objects.filter(pk=admin.pk).update(is_active=False)
    elif how == "deleted":
        admin.delete()
    else:
        mine = Membership.objects.filter(user=admin, project=team)
        mine.delete() if how == "removed" else mine.update(role=Role.VIEWER)
    answer = client.post(path, ANN)
    assert (answer.status_code, "is no longer a project admin" in answer.content.decode()) == (404, True)
