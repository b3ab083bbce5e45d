"""Validation of the responses of a single sign-on provider."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from allauth.socialaccount.models import SocialAccount
from cryptography.hazmat.primitives.asymmetric import rsa
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client

from jobs.people import sign_on as provided
from tests.jobs.people.conftest import configure_provider
from tests.jobs.people.oidc_providers import SIGNING_KEY, FakeProvider, is_logged_in, log_in_with_provider

DEEP = "[" * 100_000
PAGE = "The single sign-on provider did not confirm your identity."


@pytest.mark.parametrize(
    ("claims", "address"),
    [
        ({"email": "a@acme.example", "email_verified": True}, "a@acme.example"),
        ({"email": "a@acme.example", "email_verified": "true"}, "a@acme.example"),
        ({"email": "a@acme.example"}, ""),
        ({"email": "a@acme.example", "email_verified": False}, ""),
        ({"email": "a@acme.example", "email_verified": "false"}, ""),
        ({"email": "a@acme.example", "email_verified": None}, ""),
        ({"email": "a@acme.example", "email_verified": ["x"]}, ""),
        ({"email": "no address", "email_verified": True}, ""),
        ({"email": "a" * 300 + "@acme.example", "email_verified": True}, ""),
        ({"email": ["a@acme.example"], "email_verified": True}, ""),
    ],
)
def test_stores_only_verified_addresses(
    claims: dict[str, Any], address: str, db: None, client: Client, answers: FakeProvider
) -> None:
    """Only a verified address is stored, because an invitation can depend on it."""
    answers.userinfo |= claims
    log_in_with_provider(client)
    assert User.objects.get().email == address
    assert is_logged_in(client)


@pytest.mark.parametrize(
    "claims",
    [
        {"preferred_username": 7},
        {"preferred_username": {"a": [1]}, "name": ["x"]},
        {"preferred_username": "a\x00b", "given_name": "\ud800", "family_name": None},
        {"preferred_username": "+1+1"},
        {"preferred_username": "\u0430lice"},
        {"preferred_username": "a" * 10_000, "name": "b" * 10_000, "given_name": "c" * 10_000},
        {"weight": float("nan"), "nested": [[[[]]]]},
    ],
)
def test_ignores_invalid_names(claims: dict[str, Any], db: None, client: Client, answers: FakeProvider) -> None:
    answers.userinfo |= claims
    answers.id_claims |= claims
    assert log_in_with_provider(client).status_code == 302
    assert is_logged_in(client)
    username = User.objects.get().username
    assert username.isascii()
    assert username[0].isalnum()


@pytest.mark.parametrize("subject", [None, "", 42, True, ["42"], "a\x00b", "\ud800", "s" * 192])
def test_rejects_an_invalid_subject(subject: Any, db: None, client: Client, answers: FakeProvider) -> None:
    answers.userinfo = {"sub": subject}
    answers.id_claims = {"sub": subject}
    assert is_refused(log_in_with_provider(client))
    assert not User.objects.exists()


def test_rejects_different_subjects(db: None, client: Client, answers: FakeProvider) -> None:
    answers.userinfo = {"sub": "43"}
    assert is_refused(log_in_with_provider(client))
    assert not SocialAccount.objects.exists()


@pytest.mark.parametrize(
    "token",
    [
        "",
        "[]",
        "{}",
        DEEP,
        "null",
        '"a"',
        {"access_token": "a", "id_token": None},
        {"access_token": "a", "expires_in": "x"},
    ],
)
def test_rejects_an_invalid_token(token: Any, db: None, client: Client, answers: FakeProvider) -> None:
    answers.token = token
    assert is_refused(log_in_with_provider(client))


@pytest.mark.parametrize(
    ("key", "algorithm", "key_id"),
    [
        (rsa.generate_private_key(public_exponent=65537, key_size=2048), "RS256", "key-1"),
        (SIGNING_KEY, "RS256", "key-2"),
        ("a client secret of at least thirty-two bytes", "HS256", "key-1"),
        (None, "none", "key-1"),
    ],
    ids=["other key", "unknown key", "symmetric key", "no signature"],
)
def test_rejects_a_token_that_the_provider_did_not_sign(
    key: Any, algorithm: str, key_id: str, db: None, client: Client, answers: FakeProvider
) -> None:
    answers.signing_key, answers.algorithm, answers.key_id = key, algorithm, key_id
    assert is_refused(log_in_with_provider(client))
    assert not User.objects.exists()


@pytest.mark.parametrize("userinfo", ["", "[]", "null", DEEP, "{}", '{"sub": NaN}'])
def test_rejects_invalid_userinfo(userinfo: str, db: None, client: Client, answers: FakeProvider) -> None:
    answers.userinfo = userinfo
    assert is_refused(log_in_with_provider(client))


@pytest.mark.parametrize("discovery", ["", "[]", "{}", DEEP, {"issuer": 1}, {"token_endpoint": "file:///etc/passwd"}])
def test_rejects_an_invalid_discovery_document(discovery: Any, db: None, client: Client, answers: FakeProvider) -> None:
    answers.discovery = {**answers.discovery, **discovery} if isinstance(discovery, dict) else discovery
    assert is_refused(log_in_with_provider(client))
    assert not Session.objects.exists()


@pytest.mark.parametrize("path", ["", "/.well-known/openid-configuration"])
@pytest.mark.parametrize("suffix", ["", "/"])
def test_issuer_may_differ_by_a_trailing_slash(
    path: str, suffix: str, db: None, client: Client, answers: FakeProvider, settings: Any
) -> None:
    configure_provider(answers.url + path, settings)
    answers.discovery["issuer"] = answers.id_claims["iss"] = answers.url + suffix
    assert log_in_with_provider(client).status_code == 302
    assert is_logged_in(client)


@pytest.mark.parametrize("path", ["", "/.well-known/openid-configuration", "/.well-known/openid-configuration/tenant"])
def test_rejects_a_document_of_another_issuer(
    path: str, db: None, client: Client, answers: FakeProvider, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenID Connect Discovery 1.0, section 4.3, requires the issuer to match the configured URL."""
    configure_provider(answers.url + path, settings)
    other = f"{answers.url}/other"
    answers.discovery["issuer"] = answers.id_claims["iss"] = other
    assert is_refused(log_in_with_provider(client))
    assert f"names the issuer {other}, but MESHBOARD_OIDC_URL is {answers.url}" in caplog.text
    assert not User.objects.exists()


def test_caches_the_discovery_document(db: None, answers: FakeProvider) -> None:
    for _ in range(3):
        log_in_with_provider(Client())
    assert answers.discovery_requests == 1


def test_limits_concurrent_requests_to_the_provider(
    db: None, answers: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login gets 503 at once while the allowed number of logins wait for the provider."""
    slots = threading.BoundedSemaphore(1)
    slots.acquire()
    monkeypatch.setattr(provided, "_request_slots", slots)
    response = Client().get("/login/oidc/board/login/")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert answers.discovery_requests == 0
    slots.release()
    assert log_in_with_provider(Client()).status_code == 302
    assert slots.acquire(blocking=False), "a completed request frees its slot"


def is_refused(response: Any) -> bool:
    return response.status_code == 401 and PAGE in response.content.decode()
