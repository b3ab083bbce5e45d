"""REST views of hosts and join tokens."""

from __future__ import annotations

import logging
from typing import Any

from django.http import Http404
from drf_spectacular.utils import OpenApiResponse
from redis.exceptions import RedisError
from rest_framework.request import Request
from rest_framework.response import Response

from contracts.codec import BadMessageError, validate_join_request
from jobs.api import openapi
from jobs.api.access import JoinThrottle
from jobs.api.errors import RETRY_LATER, refuse, reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import describe_page_parameters, get_page
from jobs.api.views import APIView, HostStaffView, get_user
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


class HostsView(APIView):
    @operation("listHosts", openapi.describe_list("HostBrief"), parameters=describe_page_parameters(None))
    def get(self, request: Request) -> Response:
        """List the hosts by name. With `limit`, the list is paginated."""
        page = get_page(request, Host.objects.present(), "name", default_limit=None)
        free = count_free_slots()
        return Response([serialize_host_brief(host, free.get(host.pk, 0)) for host in page.rows], headers=page.headers)


class HostView(APIView):
    @operation("getHost", "HostDetail", 404)
    def get(self, request: Request, name: str) -> Response:
        """Show a host with its slots, their jobs, and the facts that the host reports."""
        return _respond_with_host(_find_host(name), request.user)


class JoinHostView(APIView):
    authentication_classes = ()
    permission_classes = ()
    throttle_classes = [JoinThrottle]

    @operation(
        "joinHost",
        {
            201: openapi.describe_response("JoinResponse", "The machine joined under the requested host name."),
            200: openapi.describe_response(
                "JoinResponse", "The machine had already joined under the requested host name."
            ),
        },
        409,
        415,
        422,
        request=openapi.JOIN,
        auth=[],
    )
    def post(self, request: Request) -> Response:
        """Join the board as a host, with a join token or with the identity of an existing host.

        409: another machine has this name, or the board knows no Redis address that this machine reaches.
        """
        try:
            join_request = validate_join_request(request.data)
        except BadMessageError as error:
            field, _, message = str(error).partition(": ")
            return refuse(422, field, message, "body")
        if join_request["name"] == RESERVED:
            return refuse(422, "name", f"The host name {RESERVED} is reserved. Use another name.", "body")
        try:
            joined, new = staff.join_host(join_request, request.META["REMOTE_ADDR"])
        except joining.TokenError as error:
            return refuse(401, "token", str(error), "body")
        except joining.NameTakenError as error:
            return refuse(409, "name", str(error), "body")
        except joining.UnreachableRedisError as error:
            return refuse(409, "request", str(error))
        except (RedisError, NoRightsError) as error:
            log.warning("Cannot create the Redis user of host %s: %s", join_request["name"], error)
            words = str(error) if isinstance(error, NoRightsError) else "Meshboard cannot reach Redis. Try again later."
            return refuse(503, "request", words, headers=RETRY_LATER)
        return Response(joined, status=201 if new else 200)


class CalibrateHostView(HostStaffView):
    @operation("calibrateHost", {201: openapi.describe_response("JobDetail")}, 404, 409, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Queue a job that measures a host on all its slots, for later plans. Staff only.

        409: the host is drained or is being calibrated.
        """
        host = _find_host(name)
        reject_body(request)
        job = actions.submit_calibration(get_user(request), host)
        return Response(serialize_job(job), status=201)


class DrainHostView(HostStaffView):
    @operation("drainHost", "HostDetail", 404, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Drain a host. Running jobs continue, and no new job starts. Staff only."""
        return _drained(request, name, True)


class UndrainHostView(HostStaffView):
    @operation("undrainHost", "HostDetail", 404, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Let a drained host accept jobs again. Staff only."""
        return _drained(request, name, False)


class MarkHostLostView(HostStaffView):
    @operation("giveUpHost", "LostAttempts", 404, 409, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Mark the attempts of a silent host as lost and free its slots. Staff only.

        409: the host still sends heartbeats.
        """
        host = _find_host(name)
        reject_body(request)
        lost = actions.mark_host_lost(host, get_user(request).get_username())
        return Response({"lost": lost})


class RemoveHostView(HostStaffView):
    @operation("removeHost", {204: OpenApiResponse(description="The host is removed.")}, 404, 409, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Remove a host with its key and Redis user. Another machine can then use the name. Staff only.

        409: the host has attempts that have not ended.
        """
        host = _find_host(name)
        reject_body(request)
        staff.remove_host(host, get_user(request).get_username())
        return Response(status=204)


class HostProfileView(APIView):
    @operation("getHostProfile", "HostProfile", 404)
    def get(self, request: Request, name: str) -> Response:
        """Return all measurements of the last calibration. 404: the host was never calibrated."""
        host = _find_host(name)
        if host.profile is None:
            raise Http404("never calibrated")
        return Response(host.profile)


class JoinTokensView(HostStaffView):
    @operation("listJoinTokens", openapi.describe_list("JoinTokenDetail"))
    def get(self, request: Request) -> Response:
        """List the join tokens of the last 30 days, newest first. Staff only."""
        return Response([serialize_token(token) for token in joining.list_recent_tokens()])

    @operation("makeJoinToken", {201: openapi.describe_response("NewJoinToken")}, 415, 422, request=openapi.TOKEN)
    def post(self, request: Request) -> Response:
        """Create a join token. The response is the only one with the token. Staff only."""
        body = validate_request(joining.JoinTokenRequest, request.data)
        token, text = staff.create_token(get_user(request).get_username(), body)
        return Response({**serialize_token(token), "token": text}, status=201)


class RevokeJoinTokenView(HostStaffView):
    @operation("revokeJoinToken", "JoinTokenDetail", 404, 415, 422)
    def post(self, request: Request, key: str) -> Response:
        """Revoke a join token. Hosts that joined with it remain. Staff only."""
        number = parse_whole_number(key, 1, 2**63 - 1)
        token = None if number is None else JoinToken.objects.filter(pk=number).first()
        if token is None:
            raise NotFoundError("token")
        reject_body(request)
        staff.revoke_token(token, get_user(request).get_username())
        token.refresh_from_db()
        return Response(serialize_token(token))


def _find_host(name: str) -> Host:
    host = None if not is_storable(name) else Host.objects.present().filter(name=name).first()
    if host is None:
        raise NotFoundError("host")
    return host


def _drained(request: Request, name: str, drained: bool) -> Response:
    host = _find_host(name)
    reject_body(request)
    staff.set_drained(host, drained, get_user(request).get_username())
    host.refresh_from_db()
    return _respond_with_host(host, request.user)


def _respond_with_host(host: Host, user: Any) -> Response:
    return Response(serialize_host_detail(host, user, count_free_slots().get(host.pk, 0)))
