"""Limits of login attempts, and lockouts."""

from __future__ import annotations

import importlib
import runpy
from datetime import timedelta
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

import webapp.settings
from jobs.api.access import get_client_network
from webapp.checks import find_unsafe_settings
from webapp.environment import SettingError, WebSettings, read_settings

SAFE: dict[str, Any] = {
    "secret_key": "only-for-this-test-0123456789-0123456789-0123456789",
    "allowed_hosts": ["board.example"],
    "debug": False,
    "redis_url": "redis://:password@redis:6379/0",
}


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()


def wrong(client: Any, name: str, **more: Any) -> Any:
    return client.post("/login/", {"username": name, "password": "guess"}, **more)


def right(client: Any, name: str, **more: Any) -> Any:
    return client.post("/login/", {"username": name, "password": f"{name}-password"}, **more)


@pytest.fixture
def people(db: None) -> None:
    for name in ("ann", "bob"):
        User.objects.create_user(name, password=f"{name}-password")


def test_forwarded_headers_do_not_avoid_the_lockout(people: None, client: Any) -> None:
    answers = [wrong(client, "ann", headers={"X-Forwarded-For": f"10.0.0.{i}"}) for i in range(11)]
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["Retry-After"]) == 900
    assert right(client, "ann", headers={"X-Forwarded-For": "10.9.9.9"}).status_code == 429


def test_failures_elsewhere_lock_out_no_user(people: None, client: Any) -> None:
    for _ in range(12):
        wrong(client, "ann", REMOTE_ADDR="192.0.2.1")
    assert right(client, "ann", REMOTE_ADDR="192.0.2.1").status_code == 429
    assert right(client, "ann", REMOTE_ADDR="192.0.2.2").status_code == 302
    assert right(client, "bob", REMOTE_ADDR="192.0.2.1").status_code == 302


def test_counts_a_network_as_one_address(people: None, client: Any) -> None:
    """A customer has a network of IPv6 addresses."""
    for number in range(10):
        wrong(client, "ann", REMOTE_ADDR=f"2001:db8:1:2::{number:x}")
    assert right(client, "ann", REMOTE_ADDR="2001:db8:1:2:ffff::1").status_code == 429
    assert right(client, "ann", REMOTE_ADDR="2001:db8:1:3::1").status_code == 302


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_counts_attempts_per_address(address: str, counted: str, rf: Any) -> None:
    assert get_client_network(rf.get("/", REMOTE_ADDR=address)) == counted


def test_limits_guesses_of_the_old_password(people: None, client: Any, settings: Any) -> None:
    settings.LOGINS_PER_MINUTE = 1000
    client.force_login(User.objects.get(username="ann"))
    guess = {"old_password": "guess", "new_password1": "a-new-one-of-1", "new_password2": "a-new-one-of-1"}
    answers = [client.post("/account/password/", guess) for _ in range(21)]
    assert answers[-1].status_code == 429, [one.status_code for one in answers]
    assert "Try again in a minute." in answers[-1].content.decode()


def test_admin_login_rejects_users_without_redirects(people: None, client: Any) -> None:
    client.force_login(User.objects.get(username="ann"))
    answer = client.get("/admin/jobs/job/", follow=True)  # raises on a loop
    assert answer.status_code == 403
    assert b"Only staff can open the admin pages." in answer.content
    User.objects.filter(username="ann").update(is_staff=True)
    answer = client.get("/admin/login/?next=/admin/")
    assert (answer.status_code, answer["Location"]) == (302, "/admin/")


@pytest.mark.parametrize("path", ["/login/", "/admin/login/"])
def test_limits_login_attempts_per_address(people: None, client: Any, path: str, settings: Any) -> None:
    settings.LOGINS_PER_MINUTE = 5
    codes = [client.post(path, {"username": f"u{i}", "password": "x"}).status_code for i in range(16)]
    # A minute may begin between two attempts. More than 5 of 16 attempts are still in one minute.
    assert codes[:5] == [200] * 5
    assert 429 in codes
    assert client.get(path).status_code == 200


def test_limits_password_checks_of_a_session(people: None, client: Any, settings: Any) -> None:
    """The page that changes the password checks the old one. Its attempts must be counted too."""
    settings.LOGINS_PER_MINUTE = 5
    client.force_login(User.objects.get(username="ann"), backend="django.contrib.auth.backends.ModelBackend")
    new = {"new_password1": "another-one-9", "new_password2": "another-one-9"}
    codes = [client.post("/account/password/", {"old_password": f"x{i}", **new}).status_code for i in range(16)]
    assert codes[:5] == [422] * 5
    assert 429 in codes


def test_admin_redirects_password_changes(people: None, client: Any) -> None:
    """The admin's own page records nothing, counts no attempts, and hides its session from the list."""
    ann = User.objects.get(username="ann")
    User.objects.filter(pk=ann.pk).update(is_staff=True)
    client.force_login(ann, backend="django.contrib.auth.backends.ModelBackend")
    new = {"new_password1": "another-one-9", "new_password2": "another-one-9"}
    answer = client.post("/admin/password_change/", {"old_password": "ann-password", **new})
    assert (answer.status_code, answer["Location"]) == (302, "/account/")
    ann.refresh_from_db()
    assert ann.check_password("ann-password")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret_key": "short"}, "5 characters"),
        ({"secret_key": "aaaaa" * 20}, "of which 1 are different"),
        ({"allowed_hosts": ["*"]}, "ALLOWED_HOSTS"),
        ({"allowed_hosts": ["board.example", ""]}, "ALLOWED_HOSTS"),
        ({"debug": True}, "DEBUG=1"),
        ({"redis_url": "redis://redis:6379/0"}, "no password for redis"),
    ],
)
def test_rejects_unsafe_settings(change: dict[str, Any], words: str) -> None:
    assert find_unsafe_settings(**SAFE) == []
    assert len(found := find_unsafe_settings(**{**SAFE, **change})) == 1
    assert words in found[0]


def test_allows_debug_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {**SAFE, "allowed_hosts": ["127.0.0.1", "localhost"], "redis_url": "redis://127.0.0.1:1/0"}
    assert find_unsafe_settings(**{**local, "debug": True}) == []


def test_does_not_start_with_unsafe_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings themselves reject the values, so web, controller and commands do not start."""
    monkeypatch.setenv("MESHBOARD_ALLOWED_HOSTS", "*")
    with pytest.raises(ImproperlyConfigured, match="MESHBOARD_ALLOWED_HOSTS"):
        importlib.reload(webapp.settings)


@pytest.mark.parametrize("values", ["*", "proxy.example", "10.0.0.0/33"])
def test_trusts_proxies_by_address(monkeypatch: pytest.MonkeyPatch, values: str) -> None:
    monkeypatch.setenv("MESHBOARD_TRUSTED_PROXIES", values)
    with pytest.raises(SettingError, match="MESHBOARD_TRUSTED_PROXIES"):
        read_settings(WebSettings)


def test_cookies_belong_to_the_host_under_https(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {}
    for https in ("0", "1"):
        monkeypatch.setenv("MESHBOARD_HTTPS", https)
        found = runpy.run_path(str(webapp.settings.__file__))
        names[https] = found["SESSION_COOKIE_NAME"], found["CSRF_COOKIE_NAME"], found["SESSION_COOKIE_SECURE"]
    assert names == {"0": ("sessionid", "csrftoken", False), "1": ("__Host-sessionid", "__Host-csrftoken", True)}


def get_session_seconds() -> float:
    return (Session.objects.get().expire_date - timezone.now()).total_seconds()


def test_session_ends_without_requests_and_after_its_longest_time(people: None, client: Any, settings: Any) -> None:
    settings.SESSION_IDLE_S, settings.SESSION_COOKIE_AGE = 3600, 36_000
    client.post("/login/", {"username": "ann", "password": "ann-password"})
    assert 3500 < get_session_seconds() <= 3600
    session = client.session
    session.set_expiry(1800)
    session["renewed"] -= 1800
    session.save()
    assert client.get("/account/").status_code == 200
    assert 3500 < get_session_seconds() <= 3600, "a request renews the session"
    session = client.session
    session["began"] -= 35_000
    session["renewed"] -= 1800
    session.save()
    assert client.get("/account/").status_code == 200
    assert 900 < get_session_seconds() <= 1000, "the absolute limit stays"
    Session.objects.update(expire_date=timezone.now() - timedelta(seconds=1))
    assert client.get("/account/").headers["Location"] == "/login/?next=/account/"


def test_staff_need_a_second_factor_if_a_setting_requires_it(people: None, client: Any, settings: Any) -> None:
    ann = User.objects.get(username="ann")
    settings.STAFF_SECOND_FACTOR = True
    client.force_login(ann, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get("/account/").status_code == 200, "ann is not staff"
    User.objects.filter(pk=ann.pk).update(is_staff=True)
    activate = "/account/two-factor/totp/activate/"
    for path in ("/", "/admin/", "/account/", "/account/tokens/"):
        for call in (client.get, client.post):
            assert call(path).headers["Location"] == activate, path
    refused = client.get("/api/v1/jobs")
    assert (refused.status_code, refused.headers["Content-Type"]) == (403, "application/problem+json")
    assert "second factor" in refused.json()["detail"]
    assert client.get(activate).headers["Location"].startswith("/login/again/")
    assert client.get("/login/again/").status_code == 200
    Authenticator.objects.create(user=ann, type=Authenticator.Type.TOTP, data={})
    assert client.get("/account/").status_code == 200
    assert client.get("/api/v1/jobs").status_code == 200


def test_admin_pages_have_a_content_security_policy(people: None, client: Any) -> None:
    client.force_login(User.objects.create_superuser("root"), backend="django.contrib.auth.backends.ModelBackend")
    policy = client.get("/admin/").headers["Content-Security-Policy"]
    for directive in ("default-src 'none'", "script-src 'self' 'unsafe-eval'", "frame-ancestors 'none'"):
        assert f"{directive};" in f"{policy};"
    assert "unsafe" not in client.get("/account/").headers["Content-Security-Policy"]
