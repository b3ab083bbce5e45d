"""Staff with some rights cannot get more rights in the admin."""

from __future__ import annotations

import re
from typing import Any

import pytest
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import Group, Permission, User
from django.test import Client
from knox.models import AuthToken

PASSWORDS = dict.fromkeys(("password1", "password2"), "quite-another-1")


@pytest.fixture
def clerk(client: Client, db: None) -> User:
    """Return a user with every right in the admin, except those of a superuser."""
    made = User.objects.create_user("clerk", is_staff=True)
    made.user_permissions.set(Permission.objects.all())
    client.force_login(made)
    return made


@pytest.fixture
def root(db: None) -> User:
    return User.objects.create_superuser("root", password="root-password")


@pytest.fixture
def person(db: None) -> User:
    return User.objects.create_user("person")


def form(client: Client, path: str, **changes: Any) -> Any:
    """Return the form of a page in the admin with some changes."""
    page = client.get(path).content.decode()
    fields = dict(re.findall(r'<input[^>]*name="([a-z_0-9]+)"[^>]*value="([^"]*)"', page))
    return client.post(path, {**fields, "date_joined_0": "2026-11-25", "date_joined_1": "10:00:00", **changes})


def test_staff_cannot_become_superusers(client: Client, clerk: User) -> None:
    form(client, f"/admin/auth/user/{clerk.pk}/change/", username="clerk", is_superuser="on", is_staff="on")
    clerk.refresh_from_db()
    assert not clerk.is_superuser


def test_staff_change_accounts_without_granting_rights(client: Client, clerk: User, person: User) -> None:
    group = Group.objects.create(name="all")
    rights = {"is_superuser": "on", "is_staff": "on", "groups": [group.pk], "user_permissions": [1, 2]}
    path = f"/admin/auth/user/{person.pk}/change/"
    answer = form(client, path, username="person", first_name="Ann", is_active="on", **rights)
    assert answer.status_code == 302, answer.content.decode()
    person.refresh_from_db()
    assert (person.first_name, person.is_staff, person.is_superuser) == ("Ann", False, False)
    assert not person.get_all_permissions()


@pytest.mark.parametrize("whose", ["root", "clerk"])
def test_staff_cannot_set_passwords_of_staff(client: Client, clerk: User, root: User, whose: str) -> None:
    other = User.objects.create_user("other clerk", is_staff=True) if whose == "clerk" else root
    before = other.password
    for path in ("password", "change", "delete"):
        answer = client.post(
            f"/admin/auth/user/{other.pk}/{path}/", {**PASSWORDS, "usable_password": "true", "post": "yes"}
        )
        assert answer.status_code == 403, path
    client.post("/admin/auth/user/", {"action": "delete_selected", "_selected_action": [other.pk], "post": "yes"})
    other.refresh_from_db()
    assert other.password == before


def test_staff_set_passwords_of_users(client: Client, clerk: User, person: User) -> None:
    answer = client.post(f"/admin/auth/user/{person.pk}/password/", {**PASSWORDS, "usable_password": "true"})
    assert answer.status_code == 302, answer.content.decode()
    person.refresh_from_db()
    assert person.check_password("quite-another-1")


@pytest.mark.parametrize(
    "what", ["knox/authtoken", "socialaccount/socialaccount", "account/emailaddress", "mfa/authenticator", "auth/group"]
)
def test_staff_cannot_create_credentials(client: Client, clerk: User, root: User, what: str) -> None:
    answer = client.post(f"/admin/{what}/add/", {"user": root.pk, "provider": "board", "uid": "42", "name": "all"})
    assert answer.status_code in (403, 404)
    assert not AuthToken.objects.exists()
    assert not SocialAccount.objects.exists()


def test_staff_delete_credentials_of_users(client: Client, clerk: User, root: User, person: User) -> None:
    for owner, status, left in ((root, 403, 1), (person, 302, 0)):
        AuthToken.objects.create(owner)
        token = AuthToken.objects.get(user=owner)
        assert client.post(f"/admin/knox/authtoken/{token.pk}/delete/", {"post": "yes"}).status_code == status
        assert AuthToken.objects.filter(user=owner).count() == left


def test_superuser_has_all_account_rights(client: Client, root: User, person: User) -> None:
    client.force_login(root)
    path = f"/admin/auth/user/{person.pk}/change/"
    assert form(client, path, username="person", is_active="on", is_staff="on").status_code == 302
    person.refresh_from_db()
    assert person.is_staff
    assert client.get("/admin/knox/authtoken/add/").status_code == 200
