"""How django-allauth is bent to this board: second factors encrypted at rest, who gets an account by signing on."""

from __future__ import annotations

from typing import Any

from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib.auth.signals import user_logged_in
from django.http import HttpRequest

from jobs.people.sealing import board
from jobs.queue.audit import record

PURPOSE = "second factor"


class SecondFactors(DefaultMFAAdapter):  # type: ignore[misc]  # allauth has no types
    """Secrets of authenticator apps and seeds of recovery codes."""

    def encrypt(self, text: str) -> str:
        return board(PURPOSE).encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return board(PURPOSE).decrypt(encrypted_text).decode()


class SignOn(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth has no types
    """People of the organisation's own provider."""

    def is_open_for_signup(self, _request: HttpRequest, _sociallogin: Any) -> bool:
        """Whether somebody whom the board does not know yet gets an account, in no project."""
        return bool(settings.OIDC_NEW_PEOPLE)

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Any = None) -> Any:
        user = super().save_user(request, sociallogin, form)
        record(user.get_username(), "sign on", "user", user.get_username(), after={"by": settings.OIDC_NAME})
        return user


def connect() -> None:
    user_logged_in.connect(_note_session, dispatch_uid="note a session")


def note_session(request: HttpRequest) -> None:
    """It stands among its owner's sessions, from which it can be ended."""
    if "REMOTE_ADDR" in request.META:
        UserSession.objects.create_from_request(request)


def _note_session(request: HttpRequest, **_named: Any) -> None:
    note_session(request)
