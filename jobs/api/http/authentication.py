"""Tokens in the Authorization header, and what each was given for."""

from __future__ import annotations

from typing import Any

from django.utils import timezone
from knox.auth import TokenAuthentication
from knox.models import AuthToken
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from jobs.people.scopes import needed, refusal
from jobs.people.tokens import note_use, scopes_of

BELOW = "api/v1/"


class AsciiTokenAuthentication(TokenAuthentication):
    """knox's, and the one place that holds a token against its scopes: no view is reached by a token without it."""

    def authenticate(self, request: Request) -> Any:
        """
        Raises:
            AuthenticationFailed: the token is none, has ended or was revoked.
            PermissionDenied: it was not given for this.
        """
        found = super().authenticate(request)
        if found is None:
            return None
        user, token = found
        note_use(token, str(request.META.get("REMOTE_ADDR", ""))[:45])
        match = request.resolver_match
        assert match is not None, "a view was found"
        route, scopes = match.route.removeprefix(BELOW), scopes_of(token)
        scope = needed(str(request.method), route)
        if scope not in scopes:
            raise PermissionDenied(refusal(scope, scopes, f"{request.method} {route}"))
        user.scopes = scopes
        return user, token

    def authenticate_credentials(self, token: bytes) -> Any:
        """knox decodes the header's bytes as they come, and raises on those that no token has."""
        if not token.isascii():
            raise AuthenticationFailed("Invalid token.")
        return super().authenticate_credentials(token)

    def _cleanup_token(self, auth_token: AuthToken) -> bool:
        """Whether it has ended. knox reads all tokens of the user here, at each request; `prune` deletes those."""
        return auth_token.expiry is not None and auth_token.expiry < timezone.now()
