"""Who may report, and over what: a run's token in the header, and HTTPS but for loopback."""

from __future__ import annotations

import ipaddress
from typing import Any

from django.contrib.auth.models import User
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from jobs.core.credentials import find
from jobs.models import RunToken

SCHEME = "Run"


class RunTokenAuthentication(BaseAuthentication):
    """`Authorization: Run TOKEN`; the user is the run's owner."""

    def authenticate(self, request: Request) -> tuple[User, RunToken]:
        """Raises AuthenticationFailed."""
        scheme, _, token = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme != SCHEME:
            raise AuthenticationFailed("The run token is missing. Send the header Authorization: Run TOKEN.")
        found = find(token.strip())
        if found is None:
            raise AuthenticationFailed("The run token is invalid.")
        owner = found.attempt.job.owner
        if not owner.is_active:
            raise AuthenticationFailed("The account of the owner of the run is disabled.")
        return owner, found

    def authenticate_header(self, request: Request) -> str:
        return SCHEME


class OverHttps(BasePermission):
    """What carries a run's token, or is answered with one, does not travel readable."""

    message = "The request sends a token over unencrypted HTTP. Use HTTPS."

    def has_permission(self, request: Request, view: Any) -> bool:
        return request.is_secure() or _from_this_machine(request)


def _from_this_machine(request: Request) -> bool:
    """A connection over loopback that no proxy says it passes on."""
    if "HTTP_X_FORWARDED_PROTO" in request.META or "HTTP_X_FORWARDED_FOR" in request.META:
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False
