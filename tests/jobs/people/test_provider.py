"""What is believed of a provider that says what it likes, and what a provider that says nothing costs others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client

from jobs.people import sign_on as provided
from tests.jobs.people.conftest import signing_on_by
from tests.jobs.people.providers import Answers, comes_back, logged_in

DEEP = "[" * 100_000
PAGE = "The single sign-on provider did not confirm your identity."


@pytest.mark.parametrize(
    ("told", "address"),
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
def test_an_address_is_believed_that_the_provider_verified(
    told: dict[str, Any], address: str, db: None, client: Client, answers: Answers
) -> None:
    """An invitation may be bound to one."""
    answers.userinfo |= told
    comes_back(client)
    assert User.objects.get().email == address
    assert logged_in(client)


@pytest.mark.parametrize(
    "told",
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
def test_names_that_are_none_are_left_out(told: dict[str, Any], db: None, client: Client, answers: Answers) -> None:
    answers.userinfo |= told
    answers.signed |= told
    assert comes_back(client).status_code == 302
    assert logged_in(client)
    made = User.objects.get().username
    assert made.isascii()
    assert made[0].isalnum()


@pytest.mark.parametrize("subject", [None, "", 42, True, ["42"], "a\x00b", "\ud800", "s" * 192])
def test_without_a_subject_nobody_is_signed_on(subject: Any, db: None, client: Client, answers: Answers) -> None:
    answers.userinfo = {"sub": subject}
    answers.signed = {"sub": subject}
    assert refused(comes_back(client))
    assert not User.objects.exists()


def test_two_subjects_are_nobody(db: None, client: Client, answers: Answers) -> None:
    answers.userinfo = {"sub": "43"}
    assert refused(comes_back(client))
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
def test_a_token_that_is_none_signs_nobody_on(token: Any, db: None, client: Client, answers: Answers) -> None:
    answers.token = token
    assert refused(comes_back(client))


@pytest.mark.parametrize("told", ["", "[]", "null", DEEP, "{}", '{"sub": NaN}'])
def test_a_person_who_is_none_is_not_signed_on(told: str, db: None, client: Client, answers: Answers) -> None:
    answers.userinfo = told
    assert refused(comes_back(client))


@pytest.mark.parametrize("told", ["", "[]", "{}", DEEP, {"issuer": 1}, {"token_endpoint": "file:///etc/passwd"}])
def test_a_provider_that_does_not_say_what_it_is_is_a_page(
    told: Any, db: None, client: Client, answers: Answers
) -> None:
    answers.discovery = {**answers.discovery, **told} if isinstance(told, dict) else told
    assert refused(comes_back(client))
    assert not Session.objects.exists()


@pytest.mark.parametrize("given", ["", "/.well-known/openid-configuration"])
@pytest.mark.parametrize("told", ["", "/"])
def test_an_issuer_is_the_one_that_is_configured_but_for_a_slash(
    given: str, told: str, db: None, client: Client, answers: Answers, settings: Any
) -> None:
    signing_on_by(answers.url + given, settings)
    answers.discovery["issuer"] = answers.signed["iss"] = answers.url + told
    assert comes_back(client).status_code == 302
    assert logged_in(client)


@pytest.mark.parametrize("path", ["", "/.well-known/openid-configuration", "/.well-known/openid-configuration/tenant"])
def test_a_document_of_another_issuer_signs_nobody_on(
    path: str, db: None, client: Client, answers: Answers, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Discovery 1.0, section 4.3: whom a token is of was held against what the document said of itself alone."""
    signing_on_by(answers.url + path, settings)
    other = f"{answers.url}/other"
    answers.discovery["issuer"] = answers.signed["iss"] = other
    assert refused(comes_back(client))
    assert f"names the issuer {other}, but MESHBOARD_OIDC_URL is {answers.url}" in caplog.text
    assert not User.objects.exists()


def test_what_it_says_of_itself_is_asked_for_once(db: None, answers: Answers) -> None:
    for _ in range(3):
        comes_back(Client())
    assert answers.asked == 1


def test_those_who_wait_for_it_leave_room_for_everybody(
    db: None, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait that may: the next is told so at once."""
    full = threading.BoundedSemaphore(1)
    full.acquire()
    monkeypatch.setattr(provided, "_request_slots", full)
    answer = Client().get("/login/oidc/board/login/")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert answers.asked == 0
    full.release()
    assert comes_back(Client()).status_code == 302
    assert full.acquire(blocking=False), "whoever was answered leaves the room"


def refused(answer: Any) -> bool:
    return answer.status_code == 401 and PAGE in answer.content.decode()
