"""Second factors, sessions, and single sign-on with an OpenID Connect provider."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import User
from django.test import Client

from tests.jobs.people.oidc_providers import connect_sign_on, get_connect_proof, is_logged_in, sign_on
from tests.jobs.people.plaintext import find_tables_with

PASSWORD = {"username": "owner", "password": "owner-password"}


def compute_code(secret: str) -> str:
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30))


def turn_on_second_factor(client: Client) -> str:
    """Log in, turn on the second factor, and return its secret."""
    client.post("/login/", PASSWORD)
    response = client.get("/account/two-factor/totp/activate/")
    assert response.headers["Location"].startswith("/login/again/"), "the password is asked for again"
    client.post("/login/again/", {"password": "owner-password", "next": "/account/two-factor/totp/activate/"})
    page = client.get("/account/two-factor/totp/activate/").content.decode()
    secret = re.search(r"<code>([A-Z2-7]+)</code>", page)
    assert secret is not None, page
    assert client.post("/account/two-factor/totp/activate/", {"code": "000000"}).status_code == 200
    done = client.post("/account/two-factor/totp/activate/", {"code": compute_code(secret[1])})
    assert done.headers["Location"] == "/account/two-factor/recovery-codes/"
    return secret[1]


@pytest.mark.parametrize("path", ["/login/", "/admin/login/"])
def test_every_login_page_requires_the_second_factor(owner: User, client: Client, path: str) -> None:
    secret = turn_on_second_factor(client)
    assert find_tables_with(secret) == [], "encrypted at rest"
    codes = re.findall(r"^[0-9a-f]{8}$", client.get("/account/two-factor/recovery-codes/").content.decode(), re.M)
    codes = codes or re.findall(r"\b[0-9a-f]{8}\b", client.get("/account/two-factor/recovery-codes/").content.decode())
    other = Client()
    response = other.post(path, {**PASSWORD, "next": "/queue/"})
    assert response.headers["Location"] == "/account/two-factor/authenticate/"
    assert not is_logged_in(other), "the password is not enough"
    assert "Second factor" in other.get("/account/two-factor/authenticate/").content.decode()
    assert "Incorrect code" in other.post("/account/two-factor/authenticate/", {"code": "000000"}).content.decode()
    assert not is_logged_in(other)
    assert other.post("/account/two-factor/authenticate/", {"code": codes[0]}).headers["Location"] == "/queue/"
    assert is_logged_in(other)
    again = Client()
    again.post(path, PASSWORD)
    again.post("/account/two-factor/authenticate/", {"code": codes[0]})
    assert not is_logged_in(again), "a recovery code is valid once"


def test_turns_the_second_factor_off(owner: User, client: Client) -> None:
    turn_on_second_factor(client)
    assert "The second factor is on." in client.get("/account/").content.decode()
    assert client.post("/account/two-factor/totp/deactivate/").status_code == 302
    assert not Authenticator.objects.filter(user=owner).exists()


def test_user_ends_another_session(owner: User, stranger: User, client: Client) -> None:
    current, remote = client, Client(REMOTE_ADDR="192.0.2.9", headers={"User-Agent": "<b>Lynx"})
    for each in (current, remote):
        each.post("/login/", PASSWORD)
    page = current.get("/account/").content.decode()
    assert "192.0.2.9" in page
    assert "&lt;b&gt;Lynx" in page
    keys = re.findall(r"/account/sessions/(\d+)/end/", page)
    assert len(keys) == 1, "lists other sessions only"
    other = Client()
    other.post("/login/", {"username": "stranger", "password": "stranger-password"})
    other.post(f"/account/sessions/{keys[0]}/end/")
    assert is_logged_in(remote), "users cannot end sessions of others"
    current.post(f"/account/sessions/{keys[0]}/end/")
    assert not is_logged_in(remote)
    assert is_logged_in(current)


def test_new_password_ends_other_sessions(owner: User, client: Client) -> None:
    other = Client()
    for each in (client, other):
        each.post("/login/", PASSWORD)
    new = {"old_password": "owner-password", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    client.post("/account/password/", new)
    assert (is_logged_in(client), is_logged_in(other)) == (True, False)
    assert "this session" in client.get("/account/").content.decode()


def test_sign_on_creates_one_account(db: None, provider: str, client: Client) -> None:
    assert "Log in with Acme" in client.get("/login/").content.decode()
    httpx.put(f"{provider}/users/42", json={"preferred_username": "ann", "email": "ann@acme.example"})
    assert sign_on(client, provider, "42", "?next=/queue/").headers["Location"] == "/queue/"
    user = User.objects.get()
    assert (user.username, user.is_staff, user.has_usable_password()) == ("ann", False, False)
    assert is_logged_in(client)
    again = Client()
    sign_on(again, provider, "42")
    assert is_logged_in(again)
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"preferred_username": "\u3164", "given_name": "Ann"}, ("ann", "Ann", "")),
        ({"preferred_username": "\u115f\u1160", "given_name": "a\u202eb", "family_name": "\u2800"}, ("user", "", "")),
        ({"preferred_username": "ann", "given_name": "a\u2028b", "family_name": "Läufer"}, ("ann", "", "Läufer")),
    ],
)
def test_ignores_invisible_names(
    claims: dict[str, str], expected: tuple[str, ...], db: None, provider: str, client: Client
) -> None:
    httpx.put(f"{provider}/users/42", json=claims)
    sign_on(client, provider, "42")
    user = User.objects.get()
    assert (user.username, user.first_name, user.last_name) == expected
    assert is_logged_in(client)


def test_sign_on_does_not_take_over_an_account(owner: User, provider: str, client: Client) -> None:
    """A sign-on with the name or address of an existing account gets a new account."""
    User.objects.filter(pk=owner.pk).update(email="owner@acme.example")
    httpx.put(f"{provider}/users/7", json={"preferred_username": "owner"})
    sign_on(client, provider, "7")
    assert SocialAccount.objects.get().user != owner
    other = Client()
    httpx.put(f"{provider}/users/8", json={"preferred_username": "x", "email": "owner@acme.example"})
    sign_on(other, provider, "8")
    assert not SocialAccount.objects.filter(user=owner).exists()


def test_setting_disables_new_accounts(db: None, provider: str, client: Client, settings: Any) -> None:
    settings.OIDC_NEW_PEOPLE = False
    assert "No account" in sign_on(client, provider, "42").content.decode()
    assert not is_logged_in(client)
    assert not User.objects.exists()


def test_connects_a_sign_on_after_the_password(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    response = connect_sign_on(client, provider, "42")
    assert response.headers["Location"].startswith("/login/again/"), "the password is asked for again"
    assert not SocialAccount.objects.exists()
    client.post("/login/again/", {"password": "owner-password"})
    assert "Your account is now connected to this sign-on." in client.get("/account/").content.decode()
    other = Client()
    sign_on(other, provider, "42")
    page = other.get("/account/").content.decode()
    assert "Logged in as owner." in page
    assert "(subject <code>42</code>)" in page


def test_connection_requires_a_proof_of_the_session(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    other = Client()
    other.post("/login/", PASSWORD)
    other_proof = get_connect_proof(other)
    for query in ("", "&proof=", "&proof=x", f"&proof={other_proof}"):
        assert client.get(f"/login/oidc/board/login/?process=connect{query}").status_code == 403
    away = client.get(f"/login/oidc/board/login/?process=connect&proof={get_connect_proof(client)}")
    assert away.headers["Location"].startswith(provider)


def test_rejects_a_sign_on_of_another_account(owner: User, provider: str, client: Client) -> None:
    sign_on(Client(), provider, "42")
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    connect_sign_on(client, provider, "42")
    assert "This sign-on is connected to another account." in client.get("/account/").content.decode()
    assert not SocialAccount.objects.filter(user=owner).exists()


def test_rejects_a_second_sign_on(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    link = f"&proof={get_connect_proof(client)}"
    connect_sign_on(client, provider, "42", link)
    connect_sign_on(client, provider, "43", link)
    assert [one.uid for one in SocialAccount.objects.all()] == ["42"]
    assert "Remove this identity first." in client.get("/account/").content.decode()


def test_removes_a_sign_on_after_the_password(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    connect_sign_on(client, provider, "42")
    remove = f"/account/sign-on/{SocialAccount.objects.get().pk}/remove/"
    other = Client()
    sign_on(other, provider, "42")
    assert other.post(remove).headers["Location"].startswith("/login/again/")
    Client().post(remove)
    assert SocialAccount.objects.exists()
    client.post(remove)
    assert not SocialAccount.objects.exists()


def test_rejects_removal_of_the_only_login(db: None, provider: str, client: Client) -> None:
    sign_on(client, provider, "42")
    client.post(f"/account/sign-on/{SocialAccount.objects.get().pk}/remove/")
    assert SocialAccount.objects.exists()
    assert "You can log in only with this sign-on" in client.get("/account/").content.decode()


def test_sign_on_reports_a_disabled_account(db: None, provider: str, client: Client) -> None:
    sign_on(client, provider, "42")
    User.objects.update(is_active=False)
    other = Client()
    response = other.get(sign_on(other, provider, "42").headers["Location"])
    assert (response.status_code, "Account disabled" in response.content.decode()) == (403, True)
    assert not is_logged_in(other)


def test_sign_on_reports_a_canceled_login(db: None, provider: str, client: Client) -> None:
    state = parse_qs(urlsplit(client.get("/login/oidc/board/login/").headers["Location"]).query)["state"][0]
    response = client.get(f"/login/oidc/board/login/callback/?state={state}&error=access_denied", follow=True)
    claims = "The login was canceled at the single sign-on provider."
    assert (response.status_code, claims in response.content.decode()) == (200, True)


def test_unfinished_sign_on_expires(db: None, provider: str, client: Client) -> None:
    client.get("/login/oidc/board/login/")
    assert client.session.get_expiry_age() <= 900
    sign_on(client, provider, "42")
    assert client.session.get_expiry_age() > 86400


def test_limits_the_rate_of_sign_ons_per_address(
    db: None, provider: str, client: Client, live_redis: Any, settings: Any
) -> None:
    settings.LOGINS_PER_MINUTE = 3
    statuses = [client.get("/login/oidc/board/login/").status_code for _ in range(9)]
    assert statuses.count(302) <= 6, "a new minute can start between two requests"
    assert statuses[-1] == 429


@pytest.mark.parametrize("query", ["scope=all", "auth_params=redirect_uri%3Dhttp%3A%2F%2Fevil.example"])
def test_link_cannot_change_the_request_to_the_provider(query: str, db: None, provider: str, client: Client) -> None:
    plain, changed = (client.get(f"/login/oidc/board/login/?{one}").headers["Location"] for one in ("", query))
    names = ("client_id", "redirect_uri", "scope", "response_type")
    claims = [{name: parse_qs(urlsplit(one).query)[name] for name in names} for one in (plain, changed)]
    assert claims[0] == claims[1]


@pytest.mark.parametrize("query", ["?state=forged&code=x", "?error=access_denied", ""])
def test_rejects_a_forged_callback(query: str, db: None, provider: str, client: Client) -> None:
    response = client.get(f"/login/oidc/board/login/callback/{query}")
    assert response.status_code in (200, 302, 401)
    assert not is_logged_in(client)


def test_login_page_has_no_sign_on_without_a_provider(db: None, client: Client) -> None:
    assert "Log in with" not in client.get("/login/").content.decode()
    assert client.get("/login/oidc/board/login/").status_code == 404
