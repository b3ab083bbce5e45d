"""Login pages, and limits of login attempts.

django-axes counts failures per name and address, so that no stranger can lock out a user. This module limits the
attempts of an address with all names.
"""

from __future__ import annotations

import base64
import logging
import struct
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from allauth.account.utils import perform_login
from allauth.mfa.utils import is_mfa_enabled
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.decorators import method_decorator
from redis.exceptions import RedisError
from sesame import packers
from sesame import settings as link_settings
from sesame.tokens_v2 import unpack_timestamp
from sesame.views import LoginView as LinkView

from jobs.api.access import get_client_network
from jobs.api.errors import make_page_problem_response
from jobs.api.problems import build_request_problem
from jobs.people.sign_on import renew_session
from webapp.serving.request_guard import is_api_path

log = logging.getLogger(__name__)

WINDOW_S = 60
PATHS_BEFORE_SECOND_FACTOR = ("/account/two-factor/", "/login/", "/logout/", "/docs/", "/static/")
View = Callable[..., HttpResponseBase]


def limit_logins(view: View, method: str = "POST") -> View:
    """Limit requests of this method per address to MESHBOARD_LOGINS_PER_MINUTE over all limited views."""

    @wraps(view)
    def respond(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
        if request.method == method and _count_attempts(get_client_network(request)) > settings.LOGINS_PER_MINUTE:
            return _respond_too_many(request, WINDOW_S)
        return view(request, *arguments, **named)

    return respond


def session_middleware(get_response: Callable[[HttpRequest], HttpResponseBase]) -> View:
    """Extend sessions in use, and let staff without a second factor only turn it on if a setting requires it."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        if settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return get_response(request)
        renew_session(request.session)
        if settings.STAFF_SECOND_FACTOR and not request.path.startswith(PATHS_BEFORE_SECOND_FACTOR):
            user = request.user
            if user.is_authenticated and user.is_staff and not is_mfa_enabled(user):
                return _demand_second_factor(request)
        return get_response(request)

    return respond


def _demand_second_factor(request: HttpRequest) -> HttpResponseBase:
    if is_api_path(request.path):
        words = "This board requires a second factor of staff. Turn on the second factor on the account page."
        return make_page_problem_response(build_request_problem(403, words))
    return redirect("mfa_activate_totp")


class BoardLoginView(LoginView):
    """Login with name and password, and with a second factor if the user has one."""

    template_name = "login.html"
    redirect_authenticated_user = True

    def get_context_data(self, **named: Any) -> dict[str, Any]:
        return {**super().get_context_data(**named), "oidc": settings.OIDC_NAME}

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        made = perform_login(self.request, form.get_user(), redirect_url=self.get_success_url())
        assert isinstance(made, HttpResponse), "a redirect"
        return made


class AdminLoginView(BoardLoginView):
    """Login of staff. Other logged-in users get 403 instead of endless redirects."""

    @method_decorator(login_not_required)
    def dispatch(self, request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
        if request.user.is_authenticated and not request.user.is_staff:
            raise PermissionDenied("Only staff can open the admin pages.")
        return super().dispatch(request, *arguments, **named)


class LinkLoginView(LinkView):  # type: ignore[misc]  # django-sesame is untyped
    """Login with a one-time link, or the reason for which it does not work."""

    def login_failed(self) -> HttpResponse:
        why = explain_link(self.request.GET.get(link_settings.TOKEN_NAME, ""))
        return render(self.request, "login_link.html", {"why": why}, status=403)


def explain_link(token: str) -> str:
    """Return why a login link does not work, from the age in its token."""
    try:
        data = base64.urlsafe_b64decode(token.encode() + b"=" * (-len(token) % 4))
        _, rest = packers.packer.unpack_pk(data)
        age_s, signature = unpack_timestamp(rest)
    except (ValueError, struct.error, IndexError):
        signature, age_s = b"", 0
    if len(signature) != link_settings.SIGNATURE_SIZE:
        return "The login link is incomplete. Copy the whole link from the terminal."
    if age_s >= settings.SESAME_MAX_AGE:
        return f"The login link expired. A login link is valid for {settings.SESAME_MAX_AGE // 60} minutes."
    return "The login link was already used, or the board was restarted after it printed the link."


def signup_closed(request: HttpRequest) -> HttpResponse:
    """Replace the sign-up form of django-allauth, because users cannot create accounts."""
    return render(request, "account/signup_closed.html", status=403)


def login_cancelled(request: HttpRequest) -> HttpResponse:
    """Respond to a sign-on that the user cancelled at the provider."""
    return render(request, "socialaccount/login_cancelled.html")


def account_closed(request: HttpRequest) -> HttpResponse:
    """Respond to a sign-on to a deactivated account."""
    return render(request, "account/closed.html", status=403)


def login_locked(request: HttpRequest, _response: HttpResponse, _credentials: dict[str, Any]) -> HttpResponse:
    """Respond to too many failures of a name from an address (django-axes)."""
    return _respond_too_many(request, round(settings.AXES_COOLOFF_TIME * 3600))


def _count_attempts(address: str) -> int:
    """Count the attempts of this minute. Without Redis the count is 0, and axes still counts failures."""
    key = f"login:{address}:{int(time.time() // WINDOW_S)}"
    try:
        cache.add(key, 0, WINDOW_S)
        return int(cache.incr(key))
    except (RedisError, OSError, ValueError) as error:  # ValueError: the key expired between the calls
        log.warning("Cannot count login attempts: %s", error)
        return 0


def _respond_too_many(request: HttpRequest, seconds: int) -> HttpResponse:
    minutes = -(-seconds // 60)
    answer = render(request, "429.html", {"minutes": minutes}, status=429)
    answer["Retry-After"] = str(seconds)
    return answer
