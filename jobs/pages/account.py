"""One's own page: REST tokens, sessions, the password and the second factor."""

from __future__ import annotations

from typing import Any, cast

from allauth.account.decorators import reauthentication_required
from allauth.core.ratelimit import consume_or_429
from allauth.mfa.utils import is_mfa_enabled
from allauth.socialaccount.models import SocialAccount
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import PasswordChangeForm
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.core.audit import record
from jobs.core.pagination import listed, page_of
from jobs.core.text import storable, whole_number
from jobs.people import tokens
from jobs.people.provider import meant
from jobs.people.sealing import board
from jobs.people.signing_on import note_session
from jobs.planning.queries import checked
from planner.facts.validation import Problem, SpecError

SHOWN_ONCE = "new token"  # in the session, encrypted, from when it is made until it was shown


@require_GET
@login_required
def account(request: HttpRequest) -> HttpResponse:
    """Tokens, sessions, second factor, password."""
    return _page(request)


@require_http_methods(["GET", "POST"])
@login_required
def make_token(request: HttpRequest) -> HttpResponse:
    """Make one, then show it on a page of its own: that is there once, and to load it again makes no other."""
    if request.method == "GET":
        return _shown_once(request)
    try:
        asked = checked(tokens.TokenWish, _wish(request.POST))
        made = tokens.make(_user(request), asked)
    except SpecError as error:
        messages.error(request, refusal(error))
        return redirect("account")
    request.session[SHOWN_ONCE] = board(SHOWN_ONCE).encrypt(f"{made.token.token_key} {made.text}".encode()).decode()
    return redirect("account-token-new")


def _shown_once(request: HttpRequest) -> HttpResponse:
    sealed = request.session.pop(SHOWN_ONCE, None)
    key, _, text = board(SHOWN_ONCE).decrypt(sealed).decode().partition(" ") if sealed else ("", "", "")
    token = tokens.known(_user(request)).filter(token_key=key).first() if key else None
    if token is None:
        return redirect("account")
    answer = render(request, "people/token.html", {"token": token, "text": text})
    answer["Cache-Control"] = "no-store"
    return answer


@require_POST
@login_required
def revoke_token(request: HttpRequest, key: str) -> HttpResponse:
    if storable(key) and tokens.revoke(_user(request), key):
        messages.success(request, "The token is revoked.")
    return redirect("account")


@sensitive_post_parameters()
@require_POST
@login_required
def change_password(request: HttpRequest) -> HttpResponse:
    """It ends every token, and every session but this one. Guesses of the old one count as those of `login/again/`."""
    if refused := consume_or_429(request, action="reauthenticate", user=_user(request)):
        return cast(HttpResponse, refused)
    form: Any = PasswordChangeForm(_user(request), request.POST)
    if not form.is_valid():
        return _page(request, form)
    form.save()
    record(_user(request).get_username(), "change password", "user", _user(request).get_username())
    update_session_auth_hash(request, form.user)
    note_session(request)
    messages.success(request, "Your password was changed. Your tokens and other sessions were revoked.")
    return redirect("account")


@require_POST
@login_required
@reauthentication_required  # type: ignore[untyped-decorator]  # allauth has no types
def remove_sign_on(request: HttpRequest, key: int) -> HttpResponse:
    """An identity of the provider's logs in to this account no longer."""
    found = SocialAccount.objects.filter(user=_user(request), pk=key).first()
    if found is None:
        return redirect("account")
    if not _user(request).has_usable_password():
        messages.error(
            request, "You can log in only with this sign-on. Ask staff for a password before you remove the sign-on."
        )
        return redirect("account")
    found.delete()
    messages.success(request, "The single sign-on identity was removed from your account.")
    return redirect("account")


@require_POST
@login_required
def end_session(request: HttpRequest, key: int) -> HttpResponse:
    """Log out a browser of one's own, wherever it is."""
    session = UserSession.objects.filter(user=_user(request), pk=key).first()
    if session is not None:
        session.end()
        record(_user(request).get_username(), "end session", "user", _user(request).get_username())
        messages.success(request, "The session is ended.")
    return redirect("account")


def refusal(error: SpecError) -> str:
    """In one line, as a message above a page."""
    return " ".join(problem.sentence for problem in error.problems)


def _page(request: HttpRequest, form: Any = None) -> HttpResponse:
    user = _user(request)
    found = listed(request, tokens.known(user), "grant__name")
    sessions = sorted(UserSession.objects.purge_and_list(user), key=lambda one: one.created_at, reverse=True)
    context = {
        "listed": found,
        "tokens": [tokens.told(token) for token in found.page],
        "has_password": user.has_usable_password(),
        "form": form,
        "token_days": settings.TOKEN_DAYS,
        "sessions": page_of(request, sessions, "sessions"),
        "second_factor": is_mfa_enabled(user),
        "oidc": settings.OIDC_NAME,
        "signed_on": [_signed_on(one) for one in SocialAccount.objects.filter(user=user).order_by("pk")],
        "meant": meant(request),
    }
    return render(request, "people/account.html", context, status=422 if form is not None else 200)


def _signed_on(identity: SocialAccount) -> dict[str, Any]:
    """How its provider calls whom, where it does, and since when it is connected."""
    told = identity.extra_data.get("userinfo", {})
    names = [told[name] for name in ("preferred_username", "name", "email") if isinstance(told.get(name), str)]
    return {
        "key": identity.pk,
        "subject": identity.uid,
        "name": names[0] if names else "",
        "since": identity.date_joined,
    }


def _wish(form: QueryDict) -> dict[str, Any]:
    """A form's fields as JSON would have them: what is left out is for the parser to name.

    Raises:
        SpecError: the days are none that this board lets a token last.
    """
    asked: dict[str, Any] = {"name": form.get("name", "").strip(), "scopes": form.getlist("scopes")}
    if told := form.get("days", ""):
        number = whole_number(told, 1, settings.TOKEN_DAYS)
        if number is None:
            text = f"`days` is {told[:60]!r}. Use a whole number from 1 to {settings.TOKEN_DAYS}."
            raise SpecError([Problem("days", text)])
        asked["days"] = number
    return asked


def _user(request: HttpRequest) -> User:
    return cast(User, request.user)
