"""The account page: REST tokens, sessions, password, second factor and single sign-on."""

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
from django.contrib.auth.forms import PasswordChangeForm
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.core.audit import record
from jobs.core.filters import get_list_page, get_page
from jobs.core.text import is_storable, parse_whole_number
from jobs.pages.view_helpers import get_user, get_username, join_sentences, render_secret
from jobs.people import tokens
from jobs.people.sign_on import add_session, make_proof
from jobs.people.variables import get_cipher
from jobs.planning.schemas import validate_request
from planner.facts.validation import Problem, SpecError

SESSION_ENTRY = "new token"  # session entry with the encrypted token, until its page is shown


@require_GET
def account(request: HttpRequest) -> HttpResponse:
    """Show the account page."""
    return _render_account(request)


@require_http_methods(["GET", "POST"])
def make_token(request: HttpRequest) -> HttpResponse:
    """Create a token, then redirect to a page that shows the token once. Reloading creates no other token."""
    if request.method == "GET":
        sealed = request.session.pop(SESSION_ENTRY, None)
        key, _, text = get_cipher(SESSION_ENTRY).decrypt(sealed).decode().partition(" ") if sealed else ("", "", "")
        token = tokens.get_active_tokens(get_user(request)).filter(token_key=key).first() if key else None
        if token is None:
            return redirect("account")
        return render_secret(request, "people/token.html", {"token": token, "text": text})
    try:
        made = tokens.create_token(get_user(request), _parse_token_form(request.POST))
    except SpecError as error:
        messages.error(request, join_sentences(error))
        return redirect("account")
    request.session[SESSION_ENTRY] = (
        get_cipher(SESSION_ENTRY).encrypt(f"{made.token.token_key} {made.text}".encode()).decode()
    )
    return redirect("account-token-new")


def _parse_token_form(form: QueryDict) -> tokens.ApiTokenRequest:
    data: dict[str, Any] = {"name": form.get("name", "").strip(), "scopes": form.getlist("scopes")}
    if days := form.get("days", ""):
        data["days"] = parse_whole_number(days, 1, settings.TOKEN_DAYS)
        if data["days"] is None:
            text = f"`days` is {days[:60]!r}. Use a whole number from 1 to {settings.TOKEN_DAYS}."
            raise SpecError([Problem("days", text)])
    return validate_request(tokens.ApiTokenRequest, data)


@require_POST
def revoke_token(request: HttpRequest, key: str) -> HttpResponse:
    if is_storable(key) and tokens.revoke_token(get_user(request), key):
        messages.success(request, "The token is revoked.")
    return redirect("account")


@sensitive_post_parameters()
@require_POST
def change_password(request: HttpRequest) -> HttpResponse:
    """Change the password, and end all tokens and other sessions.

    Wrong passwords count toward the rate limit of `login/again/`.
    """
    if refused := consume_or_429(request, action="reauthenticate", user=get_user(request)):
        return cast(HttpResponse, refused)
    form: Any = PasswordChangeForm(get_user(request), request.POST)
    if not form.is_valid():
        return _render_account(request, form)
    form.save()
    record(get_username(request), "change password", "user", get_username(request))
    update_session_auth_hash(request, form.user)
    add_session(request)
    messages.success(request, "Your password was changed. Your tokens and other sessions were revoked.")
    return redirect("account")


@require_POST
@reauthentication_required  # type: ignore[untyped-decorator]  # allauth has no types
def remove_sign_on(request: HttpRequest, key: int) -> HttpResponse:
    """Remove an identity of the single sign-on provider from the account."""
    found = SocialAccount.objects.filter(user=get_user(request), pk=key).first()
    if found is None:
        return redirect("account")
    if not get_user(request).has_usable_password():
        messages.error(
            request, "You can log in only with this sign-on. Ask staff for a password before you remove the sign-on."
        )
        return redirect("account")
    found.delete()
    messages.success(request, "The single sign-on identity was removed from your account.")
    return redirect("account")


@require_POST
def end_session(request: HttpRequest, key: int) -> HttpResponse:
    """Log out a browser of the user."""
    session = UserSession.objects.filter(user=get_user(request), pk=key).first()
    if session is not None:
        session.end()
        record(get_username(request), "end session", "user", get_username(request))
        messages.success(request, "The session is ended.")
    return redirect("account")


def _render_account(request: HttpRequest, form: Any = None) -> HttpResponse:
    user = get_user(request)
    found = get_list_page(request, tokens.get_active_tokens(user), "grant__name")
    sessions = sorted(UserSession.objects.purge_and_list(user), key=lambda session: session.created_at, reverse=True)
    context = {
        "listed": found,
        "tokens": [tokens.serialize_token(token) for token in found.page],
        "has_password": user.has_usable_password(),
        "form": form,
        "token_days": settings.TOKEN_DAYS,
        "sessions": get_page(request, sessions, "sessions"),
        "second_factor": is_mfa_enabled(user),
        "oidc": settings.OIDC_NAME,
        "signed_on": [_format_identity(one) for one in SocialAccount.objects.filter(user=user).order_by("pk")],
        "meant": make_proof(request),
    }
    return render(request, "people/account.html", context, status=422 if form is not None else 200)


def _format_identity(identity: SocialAccount) -> dict[str, Any]:
    claims = identity.extra_data.get("userinfo", {})
    names = [claims[name] for name in ("preferred_username", "name", "email") if isinstance(claims.get(name), str)]
    return {
        "key": identity.pk,
        "subject": identity.uid,
        "name": names[0] if names else "",
        "since": identity.date_joined,
    }
