"""The organisation's OpenID Connect provider: how often and how long it is asked, and what is believed of its answers.

django-allauth keeps the protocol; what it takes for granted of a provider, and of whoever starts it, is asked here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

from allauth.socialaccount.helpers import render_authentication_error
from allauth.socialaccount.models import SocialApp
from allauth.socialaccount.providers.base import AuthProcess, ProviderException
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.core import signing
from django.core.exceptions import PermissionDenied
from django.core.exceptions import ValidationError as InvalidError
from django.core.validators import validate_email
from django.db import IntegrityError
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from requests import RequestException

from jobs.core.text import is_storable

AT_ONCE = 8  # requests of a process that wait for the provider, of the threads that all requests share
KNOWN_S = 300.0  # what it says of itself
BEGUN_S = 900  # a session that holds nothing but a sign-on which somebody began
MEANT_S = 3600  # a link on one's own page that connects a sign-on
LONGEST_SUBJECT = 191  # letters that django-allauth keeps; the protocol allows 255
LONGEST_ADDRESS = 254  # letters of a mail address
MEANT = "connect a sign-on"
# Of JSON of any shape, where django-allauth counts on that of the protocol.
NOT_AN_ANSWER = (
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
    """OpenID Connect Discovery 1.0, section 3: what of it is used."""

    issuer: Url
    authorization_endpoint: Url
    token_endpoint: Url
    userinfo_endpoint: Url
    jwks_uri: Url
    token_endpoint_auth_methods_supported: list[str] = []


def _issuer_of(url: str) -> str:
    """Whose document stands there: what is before its well-known path, and after it (RFC 8414, section 3.1)."""
    return re.sub(r"/\.well-known/[^/]+", "", url).rstrip("/")


def _word(told: object) -> str | None:
    return told if isinstance(told, str) and is_storable(told) else None


def _address(told: object) -> str | None:
    word = _word(told)
    try:
        validate_email(word)
    except InvalidError:
        return None
    return word if word and len(word) <= LONGEST_ADDRESS else None


def _kept(told: str) -> str:
    if not is_storable(told):
        raise ValueError("contains characters that the database cannot store")
    return told


Word = Annotated[str | None, BeforeValidator(_word)]


class Claims(BaseModel):
    """OpenID Connect Core 1.0, section 5.1: what of it is used. Words that are none are left out, whoever has no
    subject is refused."""

    sub: Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_SUBJECT), AfterValidator(_kept)]
    preferred_username: Word = None
    name: Word = None
    given_name: Word = None
    family_name: Word = None
    email: Annotated[str | None, BeforeValidator(_address)] = None
    email_verified: Any = False


def believed(told: object) -> dict[str, Any]:
    """Of claims. An address that the provider did not verify is nobody's: invitations are bound to addresses.

    Raises:
        ProviderException: they tell of nobody.
    """
    try:
        claims = Claims.model_validate(told)
    except ValidationError as error:
        raise ProviderException(f"the provider's claims: {error.errors(include_input=False)}") from None
    is_verified = claims.email_verified is True or claims.email_verified == "true"  # some send words
    left_out = {"email_verified"} if is_verified else {"email", "email_verified"}
    return claims.model_dump(exclude_none=True, exclude=left_out) | ({"email_verified": True} if is_verified else {})


class Asked(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth has no types
    """As django-allauth asks a provider, with what comes back checked. Overrides private names of version 65."""

    @property
    def openid_config(self) -> dict[str, Any]:
        """Raises ProviderException, RequestException."""
        url = self.get_provider().server_url
        until, found = _known.get(url, (0.0, {}))
        if time.monotonic() > until:
            try:
                found = Discovery.model_validate(self._document()).model_dump()
            except ValidationError as error:
                raise ProviderException(f"{url}: {error.errors(include_input=False)}") from None
            _check_issuer(found["issuer"], url)
            _known[url] = time.monotonic() + KNOWN_S, found
        return found

    def _document(self) -> Any:
        return super().openid_config

    def complete_login(self, request: HttpRequest, app: Any, token: Any, **named: Any) -> Any:
        """Raises ProviderException where what it signed and what it tells are of two people: Core 1.0, 5.3.2."""
        if not named["response"].get("id_token"):
            raise ProviderException("The sign-on provider sent no `id_token`.")
        login = super().complete_login(request, app, token, **named)
        told = login.account.extra_data
        if told["id_token"]["sub"] != told["userinfo"]["sub"]:
            raise ProviderException(
                "The `userinfo` and the `id_token` of the sign-on provider name different subjects."
            )
        return login

    def _fetch_user_info(self, access_token: str) -> dict[str, Any]:
        return believed(super()._fetch_user_info(access_token))

    def _decode_id_token(self, app: Any, id_token: str) -> dict[str, Any]:
        return believed(super()._decode_id_token(app, id_token))


def _check_issuer(issuer: str, url: str) -> None:
    """Discovery 1.0, section 4.3: else one provider's document could be served for another's.

    Raises:
        ProviderException: it is another than that whose document was asked for.
    """
    if issuer.rstrip("/") != _issuer_of(url):
        raise ProviderException(
            f"The document {url} names the issuer {issuer}, but MESHBOARD_OIDC_URL is {_issuer_of(url)}."
        )


_known: dict[str, tuple[float, dict[str, Any]]] = {}
_room = threading.BoundedSemaphore(AT_ONCE)


@require_GET
@login_not_required
def begin(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    """To the provider. Of what the address asks for, only where to go then is passed on, and whether a sign-on is to be
    connected, which a page elsewhere could ask for as well: it needs the proof of one's own page."""
    asked = QueryDict(mutable=True)
    if address := request.GET.get("next"):
        asked["next"] = address
    if request.GET.get("process") == AuthProcess.CONNECT:
        if not _is_meant(request):
            raise PermissionDenied("To connect a single sign-on identity, use your account page.")
        asked["process"] = AuthProcess.CONNECT
    request.GET = asked  # type: ignore[assignment]  # Django's own are immutable
    answer = _answered(request, provider_id, OAuth2LoginView)
    if request.session.session_key and not request.user.is_authenticated:
        request.session.set_expiry(BEGUN_S)
    return answer


@login_not_required
def come_back(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    """From the provider, with its answer."""
    return _answered(request, provider_id, OAuth2CallbackView)


def meant(request: HttpRequest) -> str:
    """What shows that whoever is logged in here asks for a sign-on to be connected: good in this session."""
    return signing.dumps(_whose(request), salt=MEANT)


def _is_meant(request: HttpRequest) -> bool:
    try:
        return bool(signing.loads(request.GET.get("proof", ""), salt=MEANT, max_age=MEANT_S) == _whose(request))
    except signing.BadSignature:
        return False


def _whose(request: HttpRequest) -> list[Any]:
    return [request.user.pk, request.session.session_key]


def _answered(request: HttpRequest, provider_id: str, view: Any) -> HttpResponseBase:
    """Whatever the provider says or does not say: a page."""
    if not _room.acquire(blocking=False):
        return _busy(request)
    try:
        adapter = Asked(request, provider_id)
        answer: Callable[[HttpRequest], HttpResponseBase] = view.adapter_view(adapter)
        return answer(request)
    except SocialApp.DoesNotExist:
        raise Http404 from None
    except NOT_AN_ANSWER as error:
        page: HttpResponse = render_authentication_error(request, adapter.get_provider(), exception=error)
        return page
    except IntegrityError:  # in this moment somebody, maybe the same browser, has signed on as well
        messages.error(request, "The sign-on provider answered several times. Try again.")
        return redirect("account")
    finally:
        _room.release()


def _busy(request: HttpRequest) -> HttpResponse:
    answer = render(
        request, "503.html", {"words": "Too many users are signing on at the moment. Try again later."}, status=503
    )
    answer["Retry-After"] = "5"
    return answer
