"""Tokens in the Authorization header."""

from __future__ import annotations

from typing import Any

from knox.auth import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed


class AsciiTokenAuthentication(TokenAuthentication):
    """knox decodes the header's bytes as they come, and raises on those that no token has."""

    def authenticate_credentials(self, token: bytes) -> Any:
        if not token.isascii():
            raise AuthenticationFailed("Invalid token.")
        return super().authenticate_credentials(token)
