"""REST of hosts and of the tokens that they join with."""

from __future__ import annotations

import logging
from typing import Any

from django.http import Http404
from drf_spectacular.utils import OpenApiResponse, extend_schema
from redis.exceptions import RedisError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import SimpleRateThrottle

from contracts.codec import BadMessageError, validate_join_request
from jobs.api.document import schema
from jobs.api.http.errors import LATER
from jobs.api.http.origin import origin
from jobs.api.http.paged import paged, parameters
from jobs.api.http.views import APIView
from jobs.api.shared import MayChangeHosts, refusals, refuse, refuse_body, user_of
from jobs.core.errors import NotFoundError
from jobs.core.job_details import serialize_job
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Host, JoinToken
from jobs.planning.schemas import validate_request
from jobs.queue import actions
from jobs.queue import staff_actions as staff
from jobs.queue.hosts import joining
from jobs.queue.hosts.presentation import serialize_host_brief, serialize_host_detail, serialize_token
from jobs.queue.hosts.redis_access import NoRightsError
from jobs.queue.scheduling.snapshot import count_free_slots

log = logging.getLogger(__name__)

RESERVED = "join"  # its address is where hosts join


class JoinThrottle(SimpleRateThrottle):
    """By the address of the connection, which `webapp.serve` takes from trusted proxies only."""

    scope = "join"
    rate = "120/min"

    def get_cache_key(self, request: Request, view: Any) -> str:
        return f"join:{origin(request)}"

    def allow_request(self, request: Request, view: Any) -> bool:
        try:
            return super().allow_request(request, view)
        except (RedisError, OSError) as error:  # Redis only counts here; the token is what keeps people out
            log.warning("Redis is unavailable, so joins are not rate-limited: %s", error)
            return True


class Hosts(APIView):
    """Where jobs run."""

    @extend_schema(
        operation_id="listHosts",
        parameters=parameters(None),
        responses={200: schema.list_of("HostBrief"), **refusals()},
    )
    def get(self, request: Request) -> Response:
        """Every host that was not removed, by name; with `limit`, page by page."""
        page = paged(request, Host.objects.present(), "name", usual=None)
        free = count_free_slots()
        return Response([serialize_host_brief(host, free.get(host.pk, 0)) for host in page.rows], headers=page.headers)


class HostView(APIView):
    """One host."""

    @extend_schema(operation_id="getHost", responses={200: schema.of("HostDetail"), **refusals(404)})
    def get(self, request: Request, name: str) -> Response:
        """Its slots with the jobs on them, and what it says of itself."""
        return _told(_find_host(name), request.user)


class Join(APIView):
    """Become a host."""

    authentication_classes = ()
    permission_classes = ()
    throttle_classes = [JoinThrottle]

    @extend_schema(
        operation_id="joinHost",
        auth=[],
        request=schema.JOIN,
        responses={
            201: schema.of("JoinResponse", "The machine joined under the requested host name."),
            200: schema.of("JoinResponse", "The machine had already joined under the requested host name."),
            **refusals(409, 415, 422, 429),
        },
    )
    def post(self, request: Request) -> Response:
        """A machine joins with a token, or shows by its identity that it still is the host. 409: the name is another
        machine's, or the board knows no address of Redis that this one reaches."""
        try:
            told = validate_join_request(request.data)
        except BadMessageError as error:
            field, _, message = str(error).partition(": ")
            return refuse(422, field, message, "body")
        if told["name"] == RESERVED:
            return refuse(422, "name", f"The host name {RESERVED} is reserved. Use another name.", "body")
        try:
            joined, new = staff.join_host(told, request.META["REMOTE_ADDR"])
        except joining.TokenError as error:
            return refuse(401, "token", str(error), "body")
        except joining.NameTakenError as error:
            return refuse(409, "name", str(error), "body")
        except joining.UnreachableRedisError as error:
            return refuse(409, "request", str(error))
        except (RedisError, NoRightsError) as error:
            log.warning("Cannot create the Redis user of host %s: %s", told["name"], error)
            words = str(error) if isinstance(error, NoRightsError) else "Meshboard cannot reach Redis. Try again later."
            return refuse(503, "request", words, headers=LATER)
        return Response(joined, status=201 if new else 200)


class OfStaff(APIView):
    """For staff with the right to change hosts."""

    permission_classes = [IsAuthenticated, MayChangeHosts]


class Calibrate(OfStaff):
    """Measure a host."""

    @extend_schema(
        operation_id="calibrateHost",
        request=None,
        responses={201: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """Queue a job that measures the host on all its slots; the planner then uses what it found. 409 while it is
        drained or being measured already. Staff only."""
        host = _find_host(name)
        refuse_body(request)
        try:
            job = actions.submit_calibration(user_of(request), host)
        except actions.CalibrationError as error:
            return refuse(409, "host", str(error))
        return Response(serialize_job(job), status=201)


class Drain(OfStaff):
    """Let a host finish."""

    @extend_schema(
        operation_id="drainHost",
        request=None,
        responses={200: schema.of("HostDetail"), **refusals(403, 404, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """What runs goes on, and nothing new starts. Draining a drained host changes nothing. Staff only."""
        return _drained(request, name, True)


class Undrain(OfStaff):
    """Let a host take jobs again."""

    @extend_schema(
        operation_id="undrainHost",
        request=None,
        responses={200: schema.of("HostDetail"), **refusals(403, 404, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """It takes jobs again. Staff only."""
        return _drained(request, name, False)


class GiveUp(OfStaff):
    """Declare a host gone."""

    @extend_schema(
        operation_id="giveUpHost",
        request=None,
        responses={200: schema.of("LostAttempts"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """A silent host that will not return: its attempts are lost, its slots free. 409 if it speaks. Staff only."""
        host = _find_host(name)
        refuse_body(request)
        try:
            lost = actions.mark_host_lost(host, user_of(request).get_username())
        except actions.HostConnectedError as error:
            return refuse(409, "host", str(error))
        return Response({"lost": lost})


class Remove(OfStaff):
    """Take a host's name, key and Redis user away."""

    @extend_schema(
        operation_id="removeHost",
        request=None,
        responses={204: OpenApiResponse(description="The host is removed."), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """Whatever it says from now on is refused, and another machine may join under its name. 409 while it has
        attempts that did not end. Staff only."""
        host = _find_host(name)
        refuse_body(request)
        try:
            staff.remove_host(host, user_of(request).get_username())
        except staff.BusyHostError as error:
            return refuse(409, "host", str(error))
        return Response(status=204)


class Profile(APIView):
    """What a calibration measured."""

    @extend_schema(operation_id="getHostProfile", responses={200: schema.of("HostProfile"), **refusals(404)})
    def get(self, request: Request, name: str) -> Response:
        """Every point, as `HostProfile` in planner.hardware describes them; 404 while the host was never measured."""
        host = _find_host(name)
        if host.profile is None:
            raise Http404("never calibrated")
        return Response(host.profile)


class Tokens(OfStaff):
    """What machines join with."""

    @extend_schema(operation_id="listJoinTokens", responses={200: schema.list_of("JoinTokenDetail"), **refusals(403)})
    def get(self, request: Request) -> Response:
        """Every join token of the last 30 days, the newest first. Staff only."""
        return Response([serialize_token(token) for token in joining.list_recent_tokens()])

    @extend_schema(
        operation_id="makeJoinToken",
        request=schema.TOKEN,
        responses={201: schema.of("NewJoinToken"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """A new join token, shown this once. Staff only."""
        asked = validate_request(joining.JoinTokenRequest, request.data)
        token, text = staff.create_token(user_of(request).get_username(), asked)
        return Response({**serialize_token(token), "token": text}, status=201)


class RevokeToken(OfStaff):
    """Let nobody join with it any more."""

    @extend_schema(
        operation_id="revokeJoinToken",
        request=None,
        responses={200: schema.of("JoinTokenDetail"), **refusals(403, 404, 415, 422)},
    )
    def post(self, request: Request, key: str) -> Response:
        """Hosts that have joined with it stay. Staff only."""
        number = parse_whole_number(key, 1, 2**63 - 1)
        token = None if number is None else JoinToken.objects.filter(pk=number).first()
        if token is None:
            raise NotFoundError("token")
        refuse_body(request)
        staff.revoke_token(token, user_of(request).get_username())
        token.refresh_from_db()
        return Response(serialize_token(token))


def _find_host(name: str) -> Host:
    host = None if not is_storable(name) else Host.objects.present().filter(name=name).first()
    if host is None:
        raise NotFoundError("host")
    return host


def _drained(request: Request, name: str, drained: bool) -> Response:
    host = _find_host(name)
    refuse_body(request)
    staff.set_drained(host, drained, user_of(request).get_username())
    host.refresh_from_db()
    return _told(host, request.user)


def _told(host: Host, user: Any) -> Response:
    return Response(serialize_host_detail(host, user, count_free_slots().get(host.pk, 0)))
