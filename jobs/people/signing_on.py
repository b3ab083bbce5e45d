"""How django-allauth is bent to this board: second factors encrypted at rest, who gets an account by signing on."""

from __future__ import annotations

import logging
import re
from typing import Any

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialAccount
from allauth.socialaccount.providers.base import AuthProcess
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.signals import user_logged_in
from django.db import IntegrityError, transaction
from django.db.models.signals import post_delete, post_save
from django.http import HttpRequest
from django.shortcuts import redirect

from jobs.core.audit import get_request_username, record
from jobs.core.text import is_storable
from jobs.models.validators import PERSON_NAMES, find_name_problem
from jobs.people.provider import Asked
from jobs.people.sealing import board

log = logging.getLogger(__name__)

PURPOSE = "second factor"
NAMES_TRIED = 8
# As of invitations, and addresses, which many providers call people by.
SIGNED_ON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")


class SecondFactors(DefaultMFAAdapter):  # type: ignore[misc]  # allauth has no types
    """Secrets of authenticator apps and seeds of recovery codes."""

    def encrypt(self, text: str) -> str:
        return board(PURPOSE).encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return board(PURPOSE).decrypt(encrypted_text).decode()


class SignOn(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth has no types
    """People of the organisation's own provider."""

    def get_provider(self, request: HttpRequest, provider: Any, client_id: str | None = None) -> Any:
        """The provider, asked as `jobs.people.provider` has it."""
        found = super().get_provider(request, provider, client_id)
        found.oauth2_adapter_class = Asked
        return found

    def is_open_for_signup(self, _request: HttpRequest, _sociallogin: Any) -> bool:
        """Whether somebody whom the board does not know yet gets an account, in no project."""
        return bool(settings.OIDC_NEW_PEOPLE)

    def populate_user(self, request: HttpRequest, sociallogin: Any, data: dict[str, Any]) -> Any:
        """A name that may not be given is left out: django-allauth makes one of what else it is told."""
        user = super().populate_user(request, sociallogin, data)
        for field in PERSON_NAMES:
            name = getattr(user, field) or ""
            if not is_storable(name) or find_name_problem(name):
                setattr(user, field, "")
        if not SIGNED_ON_NAME.fullmatch(user.username or ""):
            user.username = ""
        return user

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Of a second identity nobody would see that it logs in to the account as well."""
        if sociallogin.state.get("process") != AuthProcess.CONNECT:
            return
        if SocialAccount.objects.filter(user=request.user).exclude(pk=sociallogin.account.pk).exists():
            messages.error(request, "Your account already has a single sign-on identity. Remove this identity first.")
            raise ImmediateHttpResponse(redirect("account"))

    def on_authentication_error(self, _request: HttpRequest, provider: Any, **named: Any) -> None:
        """The page that is answered says that staff find the reason in the log."""
        log.warning("Sign-on by %s failed: %s %s", provider, named["error"], str(named["exception"] or "")[:500])

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Any = None) -> Any:
        """All of it or nothing. Whose answer of the provider came twice at once has the account that the other made; a
        name that somebody else took meanwhile is left out, as one that was taken before.

        Raises:
            IntegrityError: others took every name.
        """
        for _ in range(NAMES_TRIED):
            try:
                with transaction.atomic():
                    user = super().save_user(request, sociallogin, form)
                    name = user.get_username()
                    record(name, "sign on", "user", name, after={"by": settings.OIDC_NAME})
                    return user
            except IntegrityError as error:
                taken = error
            for unsaved in (sociallogin.user, sociallogin.account, *sociallogin.email_addresses):
                unsaved.pk, unsaved._state.adding = None, True
            sociallogin.lookup()
            if sociallogin.is_existing:
                return sociallogin.user
            sociallogin.user.username = ""
        raise taken


def connect() -> None:
    user_logged_in.connect(_note_session, dispatch_uid="note a session")
    for kind in (Authenticator, SocialAccount):
        post_save.connect(_write_added, sender=kind, dispatch_uid=f"record a new {kind.__name__}")
        post_delete.connect(_write_removed, sender=kind, dispatch_uid=f"record a removed {kind.__name__}")


def note_session(request: HttpRequest) -> None:
    """It stands among its owner's sessions, from which it can be ended."""
    if "REMOTE_ADDR" in request.META:
        UserSession.objects.create_from_request(request)


def _write_added(instance: Any, created: bool, raw: bool, **_named: Any) -> None:
    """Second factors and sign-ons, which django-allauth's own pages add and remove. What a restore loads (`raw`) comes
    with the entry of when it was added."""
    if created and not raw:
        _write_down("add", instance)


def _write_removed(instance: Any, **_named: Any) -> None:
    _write_down("remove", instance)


def _write_down(what: str, login: Any) -> None:
    owner = login.user.get_username()
    kind = "second factor" if isinstance(login, Authenticator) else "sign-on"
    told = {"type": login.type} if isinstance(login, Authenticator) else {"type": login.provider, "subject": login.uid}
    record(get_request_username(owner), f"{what} {kind}", "user", owner, after=told)


def _note_session(request: HttpRequest, **_named: Any) -> None:
    request.session.set_expiry(None)  # of one that began as no more than a sign-on
    note_session(request)
