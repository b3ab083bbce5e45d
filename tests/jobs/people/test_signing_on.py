"""Second factors, sessions, and signing on with a real OpenID Connect provider of this test's own."""

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

from tests.jobs.people.plaintext import tables_that_tell
from tests.jobs.people.providers import connect, logged_in, proof, signed_on

PASSWORD = {"username": "owner", "password": "owner-password"}


def code_of(secret: str) -> str:
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30))


def with_second_factor(client: Client) -> str:
    """Turned on as a person does; the secret."""
    client.post("/login/", PASSWORD)
    asked = client.get("/account/two-factor/totp/activate/")
    assert asked.headers["Location"].startswith("/login/again/"), "the password is asked for again"
    client.post("/login/again/", {"password": "owner-password", "next": "/account/two-factor/totp/activate/"})
    page = client.get("/account/two-factor/totp/activate/").content.decode()
    secret = re.search(r"<code>([A-Z2-7]+)</code>", page)
    assert secret is not None, page
    assert client.post("/account/two-factor/totp/activate/", {"code": "000000"}).status_code == 200
    done = client.post("/account/two-factor/totp/activate/", {"code": code_of(secret[1])})
    assert done.headers["Location"] == "/account/two-factor/recovery-codes/"
    return secret[1]


@pytest.mark.parametrize("door", ["/login/", "/admin/login/"])
def test_who_has_a_second_factor_is_asked_for_it_at_every_door(owner: User, client: Client, door: str) -> None:
    secret = with_second_factor(client)
    assert tables_that_tell(secret) == [], "encrypted at rest"
    codes = re.findall(r"^[0-9a-f]{8}$", client.get("/account/two-factor/recovery-codes/").content.decode(), re.M)
    codes = codes or re.findall(r"\b[0-9a-f]{8}\b", client.get("/account/two-factor/recovery-codes/").content.decode())
    other = Client()
    asked = other.post(door, {**PASSWORD, "next": "/queue/"})
    assert asked.headers["Location"] == "/account/two-factor/authenticate/"
    assert not logged_in(other), "the password alone"
    assert "Second factor" in other.get("/account/two-factor/authenticate/").content.decode()
    assert "Incorrect code" in other.post("/account/two-factor/authenticate/", {"code": "000000"}).content.decode()
    assert not logged_in(other)
    assert other.post("/account/two-factor/authenticate/", {"code": codes[0]}).headers["Location"] == "/queue/"
    assert logged_in(other)
    again = Client()
    again.post(door, PASSWORD)
    again.post("/account/two-factor/authenticate/", {"code": codes[0]})
    assert not logged_in(again), "a recovery code is good once"


def test_it_is_turned_off_with_a_code(owner: User, client: Client) -> None:
    with_second_factor(client)
    assert "The second factor is on." in client.get("/account/").content.decode()
    assert client.post("/account/two-factor/totp/deactivate/").status_code == 302
    assert not Authenticator.objects.filter(user=owner).exists()


def test_a_session_is_ended_from_ones_own_page(owner: User, stranger: User, client: Client) -> None:
    here, there = client, Client(REMOTE_ADDR="192.0.2.9", headers={"User-Agent": "<b>Lynx"})
    for each in (here, there):
        each.post("/login/", PASSWORD)
    page = here.get("/account/").content.decode()
    assert "192.0.2.9" in page
    assert "&lt;b&gt;Lynx" in page
    keys = re.findall(r"/account/sessions/(\d+)/end/", page)
    assert len(keys) == 1, "not the one that asks"
    other = Client()
    other.post("/login/", {"username": "stranger", "password": "stranger-password"})
    other.post(f"/account/sessions/{keys[0]}/end/")
    assert logged_in(there), "nobody ends another's"
    here.post(f"/account/sessions/{keys[0]}/end/")
    assert not logged_in(there)
    assert logged_in(here)


def test_a_new_password_ends_the_other_sessions(owner: User, client: Client) -> None:
    there = Client()
    for each in (client, there):
        each.post("/login/", PASSWORD)
    new = {"old_password": "owner-password", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    client.post("/account/password/", new)
    assert (logged_in(client), logged_in(there)) == (True, False)
    assert "this session" in client.get("/account/").content.decode()


def test_people_sign_on_with_the_provider(db: None, provider: str, client: Client) -> None:
    assert "Log in with Acme" in client.get("/login/").content.decode()
    httpx.put(f"{provider}/users/42", json={"preferred_username": "ann", "email": "ann@acme.example"})
    assert signed_on(client, provider, "42", "?next=/queue/").headers["Location"] == "/queue/"
    made = User.objects.get()
    assert (made.username, made.is_staff, made.has_usable_password()) == ("ann", False, False)
    assert logged_in(client)
    again = Client()
    signed_on(again, provider, "42")
    assert logged_in(again)
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    ("told", "made"),
    [
        ({"preferred_username": "\u3164", "given_name": "Ann"}, ("ann", "Ann", "")),
        ({"preferred_username": "\u115f\u1160", "given_name": "a\u202eb", "family_name": "\u2800"}, ("user", "", "")),
        ({"preferred_username": "ann", "given_name": "a\u2028b", "family_name": "Läufer"}, ("ann", "", "Läufer")),
    ],
)
def test_a_name_that_nobody_can_read_is_not_taken_over(
    told: dict[str, str], made: tuple[str, ...], db: None, provider: str, client: Client
) -> None:
    httpx.put(f"{provider}/users/42", json=told)
    signed_on(client, provider, "42")
    user = User.objects.get()
    assert (user.username, user.first_name, user.last_name) == made
    assert logged_in(client)


def test_a_name_or_address_that_is_taken_is_nobody_else_s(owner: User, provider: str, client: Client) -> None:
    """Whom the provider calls by the name of an account here gets not that one."""
    User.objects.filter(pk=owner.pk).update(email="owner@acme.example")
    httpx.put(f"{provider}/users/7", json={"preferred_username": "owner"})
    signed_on(client, provider, "7")
    assert SocialAccount.objects.get().user != owner
    other = Client()
    httpx.put(f"{provider}/users/8", json={"preferred_username": "x", "email": "owner@acme.example"})
    signed_on(other, provider, "8")
    assert not SocialAccount.objects.filter(user=owner).exists()


def test_nobody_new_where_the_board_says_so(db: None, provider: str, client: Client, settings: Any) -> None:
    settings.OIDC_NEW_PEOPLE = False
    assert "No account" in signed_on(client, provider, "42").content.decode()
    assert not logged_in(client)
    assert not User.objects.exists()


def test_an_account_is_connected_by_who_is_logged_in_to_it(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    asked = connect(client, provider, "42")
    assert asked.headers["Location"].startswith("/login/again/"), "the password is asked for again"
    assert not SocialAccount.objects.exists()
    client.post("/login/again/", {"password": "owner-password"})
    assert "Your account is now connected to this sign-on." in client.get("/account/").content.decode()
    other = Client()
    signed_on(other, provider, "42")
    page = other.get("/account/").content.decode()
    assert "Logged in as owner." in page
    assert "(subject <code>42</code>)" in page


def test_a_page_elsewhere_cannot_have_a_sign_on_connected(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    other = Client()
    other.post("/login/", PASSWORD)
    another_session_s = proof(other)
    for query in ("", "&proof=", "&proof=x", f"&proof={another_session_s}"):
        assert client.get(f"/login/oidc/board/login/?process=connect{query}").status_code == 403
    away = client.get(f"/login/oidc/board/login/?process=connect&proof={proof(client)}")
    assert away.headers["Location"].startswith(provider)


def test_a_sign_on_that_is_anothers_is_not_connected(owner: User, provider: str, client: Client) -> None:
    signed_on(Client(), provider, "42")
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    connect(client, provider, "42")
    assert "This sign-on is connected to another account." in client.get("/account/").content.decode()
    assert not SocialAccount.objects.filter(user=owner).exists()


def test_of_two_sign_ons_the_second_is_not_connected(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    link = f"&proof={proof(client)}"
    connect(client, provider, "42", link)
    connect(client, provider, "43", link)
    assert [one.uid for one in SocialAccount.objects.all()] == ["42"]
    assert "Remove this identity first." in client.get("/account/").content.decode()


def test_a_sign_on_is_removed_by_who_knows_the_password(owner: User, provider: str, client: Client) -> None:
    client.post("/login/", PASSWORD)
    client.post("/login/again/", {"password": "owner-password"})
    connect(client, provider, "42")
    remove = f"/account/sign-on/{SocialAccount.objects.get().pk}/remove/"
    other = Client()
    signed_on(other, provider, "42")
    assert other.post(remove).headers["Location"].startswith("/login/again/")
    Client().post(remove)
    assert SocialAccount.objects.exists()
    client.post(remove)
    assert not SocialAccount.objects.exists()


def test_the_only_way_to_log_in_is_not_removed(db: None, provider: str, client: Client) -> None:
    signed_on(client, provider, "42")
    client.post(f"/account/sign-on/{SocialAccount.objects.get().pk}/remove/")
    assert SocialAccount.objects.exists()
    assert "You can log in only with this sign-on" in client.get("/account/").content.decode()


def test_whose_account_is_closed_is_told_so(db: None, provider: str, client: Client) -> None:
    signed_on(client, provider, "42")
    User.objects.update(is_active=False)
    other = Client()
    answer = other.get(signed_on(other, provider, "42").headers["Location"])
    assert (answer.status_code, "Account disabled" in answer.content.decode()) == (403, True)
    assert not logged_in(other)


def test_who_stops_at_the_provider_is_told_so(db: None, provider: str, client: Client) -> None:
    state = parse_qs(urlsplit(client.get("/login/oidc/board/login/").headers["Location"]).query)["state"][0]
    answer = client.get(f"/login/oidc/board/login/callback/?state={state}&error=access_denied", follow=True)
    told = "The login was canceled at the single sign-on provider."
    assert (answer.status_code, told in answer.content.decode()) == (200, True)


def test_a_sign_on_that_nobody_ends_is_kept_for_minutes(db: None, provider: str, client: Client) -> None:
    client.get("/login/oidc/board/login/")
    assert client.session.get_expiry_age() <= 900
    signed_on(client, provider, "42")
    assert client.session.get_expiry_age() > 86400


def test_sign_ons_that_one_address_begins_are_counted(
    db: None, provider: str, client: Client, live_redis: Any, settings: Any
) -> None:
    settings.LOGINS_PER_MINUTE = 3
    statuses = [client.get("/login/oidc/board/login/").status_code for _ in range(9)]
    assert statuses.count(302) <= 6, "a minute may have ended meanwhile"
    assert statuses[-1] == 429


@pytest.mark.parametrize("query", ["scope=all", "auth_params=redirect_uri%3Dhttp%3A%2F%2Fevil.example"])
def test_what_the_provider_is_asked_is_not_for_a_link_to_say(
    query: str, db: None, provider: str, client: Client
) -> None:
    plain, asked = (client.get(f"/login/oidc/board/login/?{one}").headers["Location"] for one in ("", query))
    fixed = ("client_id", "redirect_uri", "scope", "response_type")
    told = [{name: parse_qs(urlsplit(one).query)[name] for name in fixed} for one in (plain, asked)]
    assert told[0] == told[1]


@pytest.mark.parametrize("query", ["?state=forged&code=x", "?error=access_denied", ""])
def test_a_forged_answer_of_the_provider_logs_nobody_in(query: str, db: None, provider: str, client: Client) -> None:
    answer = client.get(f"/login/oidc/board/login/callback/{query}")
    assert answer.status_code in (200, 302, 401)
    assert not logged_in(client)


def test_without_a_provider_there_is_none(db: None, client: Client) -> None:
    assert "Log in with" not in client.get("/login/").content.decode()
    assert client.get("/login/oidc/board/login/").status_code == 404
