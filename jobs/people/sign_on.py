"""Adapt django-allauth: check the OpenID Connect provider, encrypt second factors, and create accounts at sign-on."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import jwt
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter, get_adapter
from allauth.socialaccount.helpers import render_authentication_error
from allauth.socialaccount.models import SocialAccount, SocialApp
from allauth.socialaccount.providers.base import AuthProcess, ProviderException
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import BACKEND_SESSION_KEY
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.backends.base import SessionBase, UpdateError
from django.core import signing
from django.core.exceptions import PermissionDenied
from django.core.exceptions import ValidationError as InvalidError
from django.core.validators import validate_email
from django.db import IntegrityError, transaction
from django.db.models.signals import post_delete, post_save
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from requests import RequestException

from jobs.core.audit import get_request_username, record
from jobs.core.errors import is_database_read_only
from jobs.core.text import is_storable
from jobs.models.validators import PERSON_NAMES, find_name_problem
from jobs.people.variables import get_cipher

MAX_CONCURRENT_REQUESTS = 8  # per process that wait for the provider
DISCOVERY_CACHE_S = 300.0
UNFINISHED_SESSION_S = 900  # lifetime of a session during a sign-on
PROOF_LIFETIME_S = 3600
MAX_SUBJECT_CHARACTERS = 191  # limit of django-allauth. The protocol allows 255.
MAX_ADDRESS_CHARACTERS = 254
SESSION_BEGAN, SESSION_RENEWED = "began", "renewed"  # Unix seconds
MAX_RENEWAL_INTERVAL_S = 300
PUBLIC_KEY_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
PROOF_SALT = "connect a sign-on"
# django-allauth raises these for JSON of an unexpected shape.
PROVIDER_ERRORS = (
    RequestException,
    ProviderException,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
Url = Annotated[str, Field(pattern=r"^https?://\S+$")]


class Discovery(BaseModel):
    """Used fields of OpenID Connect Discovery 1.0, section 3."""

    issuer: Url
    authorization_endpoint: Url
    token_endpoint: Url
    userinfo_endpoint: Url
    jwks_uri: Url
    token_endpoint_auth_methods_supported: list[str] = []


def _get_issuer(url: str) -> str:
    """Return the issuer of a discovery document from its URL (RFC 8414, section 3.1)."""
    return re.sub(r"/\.well-known/[^/]+", "", url).rstrip("/")


def _parse_text(value: object) -> str | None:
    return value if isinstance(value, str) and is_storable(value) else None


def _parse_address(value: object) -> str | None:
    word = _parse_text(value)
    try:
        validate_email(word)
    except InvalidError:
        return None
    return word if word and len(word) <= MAX_ADDRESS_CHARACTERS else None


def _check_storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("contains characters that the database cannot store")
    return text


OptionalText = Annotated[str | None, BeforeValidator(_parse_text)]


class Claims(BaseModel):
    """Used claims of OpenID Connect Core 1.0, section 5.1. Invalid optional claims are omitted."""

    sub: Annotated[
        str, Field(strict=True, min_length=1, max_length=MAX_SUBJECT_CHARACTERS), AfterValidator(_check_storable)
    ]
    preferred_username: OptionalText = None
    name: OptionalText = None
    given_name: OptionalText = None
    family_name: OptionalText = None
    email: Annotated[str | None, BeforeValidator(_parse_address)] = None
    email_verified: Any = False


def parse_claims(data: object) -> dict[str, Any]:
    """Return the valid claims. Raises ProviderException without a subject.

    Unverified mail addresses are omitted, because invitations are bound to addresses.
    """
    try:
        claims = Claims.model_validate(data)
    except ValidationError as error:
        raise ProviderException(f"the provider's claims: {error.errors(include_input=False)}") from None
    is_verified = claims.email_verified is True or claims.email_verified == "true"  # some send words
    left_out = {"email_verified"} if is_verified else {"email", "email_verified"}
    return claims.model_dump(exclude_none=True, exclude=left_out) | ({"email_verified": True} if is_verified else {})


class CheckedAdapter(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth has no types
    """OpenID Connect adapter that checks all responses. Overrides private names of django-allauth 65."""

    @property
    def openid_config(self) -> dict[str, Any]:
        """Return the discovery document from a cache. Raises ProviderException and RequestException."""
        url = self.get_provider().server_url
        until, found = _discovery_cache.get(url, (0.0, {}))
        if time.monotonic() > until:
            try:
                found = Discovery.model_validate(self._document()).model_dump()
            except ValidationError as error:
                raise ProviderException(f"{url}: {error.errors(include_input=False)}") from None
            _check_issuer(found["issuer"], url)
            _discovery_cache[url] = time.monotonic() + DISCOVERY_CACHE_S, found
        return found

    def _document(self) -> Any:
        return super().openid_config

    def complete_login(self, request: HttpRequest, app: Any, token: Any, **named: Any) -> Any:
        """Raise ProviderException if token and user info have different subjects (Core 1.0, section 5.3.2)."""
        if not named["response"].get("id_token"):
            raise ProviderException("The sign-on provider sent no `id_token`.")
        login = super().complete_login(request, app, token, **named)
        extra_data = login.account.extra_data
        if extra_data["id_token"]["sub"] != extra_data["userinfo"]["sub"]:
            raise ProviderException(
                "The `userinfo` and the `id_token` of the sign-on provider name different subjects."
            )
        return login

    def _fetch_user_info(self, access_token: str) -> dict[str, Any]:
        return parse_claims(super()._fetch_user_info(access_token))

    def _decode_id_token(self, app: Any, id_token: str) -> dict[str, Any]:
        """Return the claims after a check of the signature, which django-allauth omits for a token from a TLS server.

        The key comes from the provider's `jwks_uri`. A token that is signed with the client secret is refused.
        """
        with get_adapter().get_requests_session() as http:
            response = http.get(self.openid_config["jwks_uri"])
            response.raise_for_status()
        try:
            keys = [key for key in jwt.PyJWKSet.from_dict(response.json()).keys if key.public_key_use in (None, "sig")]
            key_id = jwt.get_unverified_header(id_token).get("kid")
            named = [key for key in keys if key_id is None or key.key_id == key_id]
            if len(named) != 1:
                raise ProviderException(f"{len(named)} keys of the sign-on provider match the `id_token`.")
            claims = jwt.decode(
                id_token,
                named[0].key,
                algorithms=PUBLIC_KEY_ALGORITHMS,
                issuer=self.openid_config["issuer"],
                audience=app.client_id,
                options={"require": ["iss", "aud", "exp"]},
            )
        except jwt.PyJWTError as error:
            raise ProviderException(f"The `id_token` of the sign-on provider is invalid: {error}") from None
        return parse_claims(claims)


def _check_issuer(issuer: str, url: str) -> None:
    """Raise ProviderException unless the issuer matches the URL (Discovery 1.0, section 4.3)."""
    if issuer.rstrip("/") != _get_issuer(url):
        raise ProviderException(
            f"The document {url} names the issuer {issuer}, but MESHBOARD_OIDC_URL is {_get_issuer(url)}."
        )


_discovery_cache: dict[str, tuple[float, dict[str, Any]]] = {}
_request_slots = threading.BoundedSemaphore(MAX_CONCURRENT_REQUESTS)


@require_GET
@login_not_required
def begin_sign_on(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    """Redirect to the provider.

    Other sites can link here, so connecting an identity requires a proof from the account page.
    """
    query = QueryDict(mutable=True)
    if address := request.GET.get("next"):
        query["next"] = address
    if request.GET.get("process") == AuthProcess.CONNECT:
        if not _has_proof(request):
            raise PermissionDenied("To connect a single sign-on identity, use your account page.")
        query["process"] = AuthProcess.CONNECT
    request.GET = query  # type: ignore[assignment]  # Django's own are immutable
    answer = _respond(request, provider_id, OAuth2LoginView)
    if request.session.session_key and not request.user.is_authenticated:
        request.session.set_expiry(UNFINISHED_SESSION_S)
    return answer


@login_not_required
def finish_sign_on(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    """Handle the redirect from the provider."""
    return _respond(request, provider_id, OAuth2CallbackView)


def make_proof(request: HttpRequest) -> str:
    """Return a proof that this session asked to connect an identity."""
    return signing.dumps(_get_session_identity(request), salt=PROOF_SALT)


def _has_proof(request: HttpRequest) -> bool:
    try:
        return bool(
            signing.loads(request.GET.get("proof", ""), salt=PROOF_SALT, max_age=PROOF_LIFETIME_S)
            == _get_session_identity(request)
        )
    except signing.BadSignature:
        return False


def _get_session_identity(request: HttpRequest) -> list[Any]:
    return [request.user.pk, request.session.session_key]


def _respond(request: HttpRequest, provider_id: str, view: Any) -> HttpResponseBase:
    """Return the response of a view of django-allauth, or an error page."""
    if not _request_slots.acquire(blocking=False):
        return _respond_busy(request)
    try:
        adapter = CheckedAdapter(request, provider_id)
        answer: Callable[[HttpRequest], HttpResponseBase] = view.adapter_view(adapter)
        return answer(request)
    except SocialApp.DoesNotExist:
        raise Http404 from None
    except PROVIDER_ERRORS as error:
        page: HttpResponse = render_authentication_error(request, adapter.get_provider(), exception=error)
        return page
    except IntegrityError:  # a concurrent sign-on, such as a double click
        messages.error(request, "The sign-on provider answered several times. Try again.")
        return redirect("account")
    finally:
        _request_slots.release()


def _respond_busy(request: HttpRequest) -> HttpResponse:
    answer = render(
        request, "503.html", {"words": "Too many users are signing on at the moment. Try again later."}, status=503
    )
    answer["Retry-After"] = "5"
    return answer


log = logging.getLogger(__name__)

PURPOSE = "second factor"
MAX_NAME_TRIES = 8
# Like names of invited accounts, and mail addresses, which many providers use as names.
SIGN_ON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth has no types
    """Encrypts secrets of authenticator apps and seeds of recovery codes."""

    def encrypt(self, text: str) -> str:
        return get_cipher(PURPOSE).encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return get_cipher(PURPOSE).decrypt(encrypted_text).decode()


class SignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth has no types
    """Creates and connects accounts of the OpenID Connect provider."""

    def get_provider(self, request: HttpRequest, provider: Any, client_id: str | None = None) -> Any:
        found = super().get_provider(request, provider, client_id)
        found.oauth2_adapter_class = CheckedAdapter
        return found

    def is_open_for_signup(self, _request: HttpRequest, _sociallogin: Any) -> bool:
        """Return whether unknown users get an account, which is in no project."""
        return bool(settings.OIDC_NEW_PEOPLE)

    def populate_user(self, request: HttpRequest, sociallogin: Any, data: dict[str, Any]) -> Any:
        """Omit invalid names. django-allauth then makes a name from other claims."""
        user = super().populate_user(request, sociallogin, data)
        for field in PERSON_NAMES:
            name = getattr(user, field) or ""
            if not is_storable(name) or find_name_problem(name):
                setattr(user, field, "")
        if not SIGN_ON_NAME.fullmatch(user.username or ""):
            user.username = ""
        return user

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Reject a second identity, which the account page could not show."""
        if sociallogin.state.get("process") != AuthProcess.CONNECT:
            return
        if SocialAccount.objects.filter(user=request.user).exclude(pk=sociallogin.account.pk).exists():
            messages.error(request, "Your account already has a single sign-on identity. Remove this identity first.")
            raise ImmediateHttpResponse(redirect("account"))

    def on_authentication_error(self, _request: HttpRequest, provider: Any, **named: Any) -> None:
        """Log the error, because the error page refers staff to the log."""
        log.warning("Sign-on by %s failed: %s %s", provider, named["error"], str(named["exception"] or "")[:500])

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Any = None) -> Any:
        """Create the account. Raises IntegrityError if other users took all tried names.

        A concurrent sign-on of the identity returns the account from that request.
        """
        for _ in range(MAX_NAME_TRIES):
            try:
                with transaction.atomic():
                    user = super().save_user(request, sociallogin, form)
                    name = user.get_username()
                    record(name, "sign on", "user", name, after={"by": settings.OIDC_NAME})
                    return user
            except IntegrityError as error:
                taken = error
            for unsaved in (sociallogin.user, sociallogin.account, *sociallogin.email_addresses):
                unsaved.pk, unsaved._state.adding = None, True
            sociallogin.lookup()
            if sociallogin.is_existing:
                return sociallogin.user
            sociallogin.user.username = ""
        raise taken


def connect_signals() -> None:
    user_logged_in.connect(_add_login_session, dispatch_uid="note a session")
    for kind in (Authenticator, SocialAccount):
        post_save.connect(_record_added, sender=kind, dispatch_uid=f"record a new {kind.__name__}")
        post_delete.connect(_record_removed, sender=kind, dispatch_uid=f"record a removed {kind.__name__}")


def add_session(request: HttpRequest) -> None:
    """Add the session to the list from which its owner can end it."""
    if "REMOTE_ADDR" in request.META:
        UserSession.objects.create_from_request(request)


def start_session(session: SessionBase) -> None:
    """Set when a session ends: after the idle limit, and at the latest after the absolute limit."""
    session[SESSION_BEGAN] = int(time.time())
    _set_session_end(session)


def renew_session(session: SessionBase) -> None:
    """Move the end of a session that is in use. A read-only database leaves the end unchanged."""
    if BACKEND_SESSION_KEY not in session:
        return
    if SESSION_BEGAN not in session:  # a login before an upgrade of the board
        session[SESSION_BEGAN] = int(time.time())
    elif time.time() - session.get(SESSION_RENEWED, 0) < min(MAX_RENEWAL_INTERVAL_S, settings.SESSION_IDLE_S / 10):
        return
    _set_session_end(session)
    try:
        session.save()
    except UpdateError as error:
        if is_database_read_only(error.__context__):
            session.modified = False  # The middleware of Django would fail, too.


def _set_session_end(session: SessionBase) -> None:
    now = int(time.time())
    left_s = session[SESSION_BEGAN] + settings.SESSION_COOKIE_AGE - now
    session[SESSION_RENEWED] = now
    session.set_expiry(max(1, min(settings.SESSION_IDLE_S, left_s)))


def _record_added(instance: Any, created: bool, raw: bool, **_named: Any) -> None:
    if created and not raw:
        _record_change("add", instance)


def _record_removed(instance: Any, **_named: Any) -> None:
    _record_change("remove", instance)


def _record_change(what: str, login: Any) -> None:
    owner = login.user.get_username()
    kind = "second factor" if isinstance(login, Authenticator) else "sign-on"
    fields = (
        {"type": login.type} if isinstance(login, Authenticator) else {"type": login.provider, "subject": login.uid}
    )
    record(get_request_username(owner), f"{what} {kind}", "user", owner, after=fields)


def _add_login_session(request: HttpRequest, **_named: Any) -> None:
    start_session(request.session)  # replaces the limit of an unfinished sign-on
    add_session(request)
