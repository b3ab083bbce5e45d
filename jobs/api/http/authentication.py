"""Tokens in the Authorization header, and what each was given for."""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from django.utils import timezone
from knox.auth import TokenAuthentication
from knox.crypto import hash_token
from knox.models import AuthToken
from knox.settings import CONSTANTS
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from jobs.people.scopes import enough, refusal
from jobs.people.tokens import note_use, scopes_of

BELOW = "api/v1/"
MOST_OF_PATH = 200  # characters, in a refusal


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
        needed = enough(str(request.method), route)
        if scopes.isdisjoint(needed):
            raise PermissionDenied(refusal(needed, scopes, f"{request.method} {request.path[:MOST_OF_PATH]}"))
        user.scopes = scopes
        return user, token

    def authenticate_credentials(self, token: bytes) -> Any:
        """The token with what it was given for, by one question: knox asks for all tokens of its owner too, and
        raises on bytes that no token has. `prune` deletes those that have ended."""
        if not token.isascii() or b"\0" in token:
            raise AuthenticationFailed("Invalid token.")
        text, now = token.decode("ascii"), timezone.now()
        digest = hash_token(text)
        known = AuthToken.objects.select_related("user", "grant")
        for one in known.filter(token_key=text[: CONSTANTS.TOKEN_KEY_LENGTH]):
            if compare_digest(digest, one.digest) and (one.expiry is None or one.expiry >= now):
                return self.validate_user(one)
        raise AuthenticationFailed("Invalid token.")
