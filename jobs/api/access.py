"""Authentication by REST token, and limits of requests per minute."""

from __future__ import annotations

import logging
import time
from hmac import compare_digest
from ipaddress import IPv6Address, IPv6Network
from typing import Any

from allauth.mfa.utils import is_mfa_enabled
from django.conf import settings
from django.core.cache import cache
from django.http import HttpRequest
from django.utils import timezone
from knox.auth import TokenAuthentication
from knox.crypto import hash_token
from knox.models import AuthToken
from knox.settings import CONSTANTS
from redis.exceptions import RedisError
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle, SimpleRateThrottle

from jobs.people.tokens import format_scope_problem, get_required_scopes, get_scopes, record_use
from jobs.runs.live.held_requests import get_held_request

log = logging.getLogger(__name__)

API_PREFIX = "api/v1/"
MAX_PATH_CHARACTERS = 200  # in a message
CUSTOMER_BITS = 64  # prefix of an IPv6 address that identifies a customer (RFC 6177)
WINDOW_S = 60
CACHE_RETRY_S = 5.0  # after a failure, because each try can take a second

_cache_retry_at = 0.0


class AsciiTokenAuthentication(TokenAuthentication):
    """Token authentication of knox that also checks the scopes of the token, and the second factor of staff."""

    def authenticate(self, request: Request) -> Any:
        """Return the user and the token, or None without a token.

        Raises:
            AuthenticationFailed: The token is unknown, expired, or revoked.
            PermissionDenied: The token lacks the scope for this request.
        """
        found = super().authenticate(request)
        if found is None:
            return None
        user, token = found
        record_use(token, str(request.META.get("REMOTE_ADDR", ""))[:45])
        match = request.resolver_match
        assert match is not None, "a view was found"
        route, scopes = match.route.removeprefix(API_PREFIX), get_scopes(token)
        needed = get_required_scopes(str(request.method), route)
        if scopes.isdisjoint(needed):
            raise PermissionDenied(
                format_scope_problem(needed, scopes, f"{request.method} {request.path[:MAX_PATH_CHARACTERS]}")
            )
        user.scopes = scopes
        if settings.STAFF_SECOND_FACTOR and user.is_staff and not is_mfa_enabled(user):
            user.is_staff = user.is_superuser = False  # for this request, and never saved
        return user, token

    def authenticate_credentials(self, token: bytes) -> Any:
        """Find the token and its scopes in one query.

        The method of knox reads all tokens of the owner, and raises for bytes that are not a token.
        """
        if not token.isascii() or b"\0" in token:
            raise AuthenticationFailed("Invalid token.")
        text, now = token.decode("ascii"), timezone.now()
        digest = hash_token(text)
        known = AuthToken.objects.select_related("user", "grant")
        for one in known.filter(token_key=text[: CONSTANTS.TOKEN_KEY_LENGTH]):
            if compare_digest(digest, one.digest) and (one.expiry is None or one.expiry >= now):
                return self.validate_user(one)
        raise AuthenticationFailed("Invalid token.")


def get_client_network(request: HttpRequest) -> str:
    """Return the address of a client, or the IPv6 network of its customer, to count requests per client."""
    address = str(request.META.get("REMOTE_ADDR", ""))
    try:
        found = IPv6Address(address)
    except ValueError:
        return address
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(IPv6Network((found, CUSTOMER_BITS), strict=False).network_address)


class RequestThrottle(BaseThrottle):
    """Limit of requests per user or token and minute. Without the cache, all requests are allowed."""

    scope = "request"

    def get_limit(self, request: Request) -> int:
        return int(settings.REQUESTS_PER_MINUTE)

    def get_client_key(self, request: Request) -> str:
        """Return the token or user of a request, or "" if the request is not counted."""
        key = getattr(request.auth, "token_key", "")
        return f"token:{key}" if key else f"user:{request.user.pk}" if request.user.pk else ""

    def allow_request(self, request: Request, view: Any) -> bool:
        held, client = get_held_request(request), self.get_client_key(request)
        if (held is not None and held.is_repeated) or not client:
            return True
        count = count_request(self.scope, client)
        return count is None or count <= self.get_limit(request)

    def wait(self) -> float:
        return WINDOW_S - time.time() % WINDOW_S


class SubmitThrottle(RequestThrottle):
    """Separate limit for POST requests that create work."""

    def allow_request(self, request: Request, view: Any) -> bool:
        self.scope = "submit" if request.method == "POST" else "request"
        return super().allow_request(request, view)

    def get_limit(self, request: Request) -> int:
        return int(settings.SUBMITS_PER_MINUTE) if self.scope == "submit" else super().get_limit(request)

    def get_client_key(self, request: Request) -> str:
        return f"user:{request.user.pk}" if self.scope == "submit" else super().get_client_key(request)


class JoinThrottle(SimpleRateThrottle):
    """Limit of join requests per address of the connection, which trusted proxies forward."""

    scope = "join"
    rate = "120/min"

    def get_cache_key(self, request: Request, view: Any) -> str:
        return f"join:{get_client_network(request)}"

    def allow_request(self, request: Request, view: Any) -> bool:
        try:
            return super().allow_request(request, view)
        except (RedisError, OSError) as error:  # the join token still protects the board
            log.warning("Redis is unavailable, so joins are not rate-limited: %s", error)
            return True


def count_request(scope: str, client: str) -> int | None:
    """Count a request and return the number in this minute, or None without the cache."""
    global _cache_retry_at
    if time.monotonic() < _cache_retry_at:
        return None
    key = f"rate:{scope}:{client}:{int(time.time() // WINDOW_S)}"
    try:
        try:
            return cache.incr(key)
        except ValueError:  # the first request of the minute
            cache.add(key, 0, 2 * WINDOW_S)
            return cache.incr(key)
    except (RedisError, OSError, ValueError) as error:  # ValueError: the key expired in between
        log.warning("Cannot count requests for the rate limits: %s", error)
        _cache_retry_at = time.monotonic() + CACHE_RETRY_S
        return None
