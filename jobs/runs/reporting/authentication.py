"""Authenticate reports of external runs by a run token, and require HTTPS except on loopback."""

from __future__ import annotations

import ipaddress
from typing import Any

from django.contrib.auth.models import User
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from jobs.core.credentials import find_run_token
from jobs.models import RunToken

SCHEME = "Run"


class RunTokenAuthentication(BaseAuthentication):
    """Authenticate `Authorization: Run TOKEN` as the owner of the run."""

    def authenticate(self, request: Request) -> tuple[User, RunToken]:
        """Raises AuthenticationFailed."""
        scheme, _, token = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme != SCHEME:
            raise AuthenticationFailed("The run token is missing. Send the header Authorization: Run TOKEN.")
        found = find_run_token(token.strip())
        if found is None:
            raise AuthenticationFailed("The run token is invalid.")
        owner = found.attempt.job.owner
        if not owner.is_active:
            raise AuthenticationFailed("The account of the owner of the run is disabled.")
        return owner, found

    def authenticate_header(self, request: Request) -> str:
        return SCHEME


class RequiresHttps(BasePermission):
    """Require HTTPS for requests that carry or return a run token."""

    message = "The request sends a token over unencrypted HTTP. Use HTTPS."

    def has_permission(self, request: Request, view: Any) -> bool:
        return request.is_secure() or _is_local(request)


def _is_local(request: Request) -> bool:
    """Return True for a loopback connection without a proxy."""
    if "HTTP_X_FORWARDED_PROTO" in request.META or "HTTP_X_FORWARDED_FOR" in request.META:
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False
