"""Logging in: how often one address may try, and what whoever is locked out is told.

django-axes counts failures by name and address together, so that nobody is locked out by a stranger elsewhere; what one
address tries with many names is bounded here.
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
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.decorators import method_decorator
from redis.exceptions import RedisError
from sesame import packers
from sesame import settings as link_settings
from sesame.tokens_v2 import unpack_timestamp
from sesame.views import LoginView as LinkView

from jobs.api.http.origin import origin

log = logging.getLogger(__name__)

WINDOW_S = 60
View = Callable[..., HttpResponseBase]


def limited(view: View, method: str = "POST") -> View:
    """At most MESHBOARD_LOGINS_PER_MINUTE requests of this method from an address, of all such views together."""

    @wraps(view)
    def bounded(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
        if request.method == method and _tries(origin(request)) > settings.LOGINS_PER_MINUTE:
            return _later(request, WINDOW_S)
        return view(request, *arguments, **named)

    return bounded


class Login(LoginView):
    """Name and password, then what django-allauth asks for besides: a second factor, of those who have one."""

    template_name = "login.html"
    redirect_authenticated_user = True

    def get_context_data(self, **named: Any) -> dict[str, Any]:
        return {**super().get_context_data(**named), "oidc": settings.OIDC_NAME}

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        made = perform_login(self.request, form.get_user(), redirect_url=self.get_success_url())
        assert isinstance(made, HttpResponse), "a redirect"
        return made


class AdminLogin(Login):
    """For staff. Who is logged in and none of them would be sent to and fro for ever."""

    @method_decorator(login_not_required)
    def dispatch(self, request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
        if request.user.is_authenticated and not request.user.is_staff:
            raise PermissionDenied("Only staff can open the admin pages.")
        return super().dispatch(request, *arguments, **named)


class LinkLogin(LinkView):  # type: ignore[misc]  # django-sesame is untyped
    """Log in with a one-time link, or explain why the link does not work."""

    def login_failed(self) -> HttpResponse:
        why = explain_link(self.request.GET.get(link_settings.TOKEN_NAME, ""))
        return render(self.request, "login_link.html", {"why": why}, status=403)


def explain_link(token: str) -> str:
    """Return why a login link does not work, from the age in its token alone."""
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


def no_account(request: HttpRequest) -> HttpResponse:
    """Where django-allauth would ask who signs on for a name and an address: nobody makes an account by hand."""
    return render(request, "account/signup_closed.html", status=403)


def cancelled(request: HttpRequest) -> HttpResponse:
    """Who tells the provider not to tell us."""
    return render(request, "socialaccount/login_cancelled.html")


def closed(request: HttpRequest) -> HttpResponse:
    """Who signs on to an account that staff deactivated."""
    return render(request, "account/closed.html", status=403)


def locked_out(request: HttpRequest, _response: HttpResponse, _credentials: dict[str, Any]) -> HttpResponse:
    """django-axes: too many failures of this name from this address."""
    return _later(request, round(settings.AXES_COOLOFF_TIME * 3600))


def _tries(address: str) -> int:
    """Of this minute, this one included; 0 while Redis is away: axes still counts failures in the database."""
    key = f"login:{address}:{int(time.time() // WINDOW_S)}"
    try:
        cache.add(key, 0, WINDOW_S)
        return int(cache.incr(key))
    except (RedisError, OSError, ValueError) as error:  # ValueError: it expired between the two
        log.warning("Cannot count login attempts: %s", error)
        return 0


def _later(request: HttpRequest, seconds: int) -> HttpResponse:
    minutes = -(-seconds // 60)
    answer = render(request, "429.html", {"minutes": minutes}, status=429)
    answer["Retry-After"] = str(seconds)
    return answer
