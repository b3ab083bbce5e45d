"""REST of one's own tokens."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiResponse, extend_schema
from knox.models import AuthToken
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.paged import paged, parameters
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse_body, user_of
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.people import tokens
from jobs.planning.schemas import validate_request

WISH = schema.request_body({"allOf": [schema.ref("ApiTokenRequest")]}, {"name": "ci", "scopes": ["read", "submit"]})


class Tokens(APIView):
    """What programs of yours show."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="listTokens",
        parameters=parameters(),
        responses={200: schema.list_of("ApiToken"), **refusals()},
    )
    def get(self, request: Request) -> Response:
        """Your REST tokens that have not ended, the newest first. A Link header with rel="next" leads to the page after
        it."""
        page = paged(request, tokens.known(user_of(request)), "-created", "-token_key")
        return Response([tokens.told(token) for token in page.rows], headers=page.headers)

    @extend_schema(
        operation_id="makeToken",
        request=WISH,
        responses={201: schema.of("NewApiToken"), **refusals(403, 415, 422, 429)},
    )
    def post(self, request: Request) -> Response:
        """A new REST token, shown this once. One that is asked for with a token may no more than that one, and ends no
        later; `shortened` says where that, or the board, cut the days asked for."""
        asked = validate_request(tokens.ApiTokenRequest, request.data)
        by = request.auth if isinstance(request.auth, AuthToken) else None
        token, text, shortened = tokens.make(user_of(request), asked, by=by)
        made: tokens.NewApiToken = {**tokens.told(token), "token": text, "shortened": shortened}
        return Response(made, status=201, headers={"Cache-Control": "no-store"})


class Token(APIView):
    """One of them."""

    @extend_schema(
        operation_id="revokeToken",
        request=None,
        responses={204: OpenApiResponse(description="The token is revoked."), **refusals(403, 404, 415, 422)},
    )
    def delete(self, request: Request, key: str) -> Response:
        """End one of your tokens."""
        refuse_body(request)
        if not is_storable(key) or not tokens.revoke(user_of(request), key):
            raise NotFoundError("token", "no such token, or it belongs to another user")
        return Response(status=204)
