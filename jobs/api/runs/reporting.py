"""REST for runs that report themselves. A person's token opens one; the run's own token does the rest."""

from __future__ import annotations

import hmac
import logging
import math
import time
from typing import Any

from django.db import transaction
from django.http import Http404
from django.urls import reverse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from redis.exceptions import RedisError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from contracts.codec import MAX_BATCH_BYTES, BadMessageError, decode_batch, decode_report
from contracts.telemetry.batches import Batch
from jobs.api.document.schema import of, ref, request_body
from jobs.api.http.errors import LATER, RunEndedProblem, of_request, refused
from jobs.api.http.parameters import BadParameterError
from jobs.api.http.problems import details
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.runs import messages
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.access import find_job, find_job_to_change
from jobs.core.credentials import hash_secret
from jobs.core.errors import NotFoundError
from jobs.core.job_details import serialize_job
from jobs.core.text import parse_whole_number
from jobs.models import Member, RunToken, describe_status
from jobs.queue.inbound import reconcile
from jobs.runs.reporting import runs
from jobs.runs.reporting.requests import (
    NodeJoined,
    NodeRequest,
    OpenedRun,
    RendezvousRequest,
    ReportResponse,
    RequiresHttps,
    RunRequest,
    RunTokenAuthentication,
    parse_request,
)
from jobs.runs.reporting.telemetry_inflow import NodeStream, TooFastError, register_ready_node, store_batch
from planner.facts.validation import Problem

log = logging.getLogger(__name__)

LARGEST_NUMBER = 2**53 - 1  # of a batch: what Redis' scripts count exactly
OF_NODES = ("log", "gauge", "start")  # items that a node says of itself too, as rank -1
NUMBER = OpenApiParameter(
    "n",
    {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER},
    required=True,
    description="Number of the batch, starting at 0. A batch with a repeated number is ignored.",
)
CLAIM = OpenApiParameter(
    "Meshboard-Claim",
    {"type": "string", "minLength": 20, "maxLength": 200},
    OpenApiParameter.HEADER,
    required=True,
    description="The `claim` that this process sent when its node joined the run.",
)
OPEN = request_body({"allOf": [ref("RunRequest")]}, {"name": "by hand", "world_size": 8, "nodes": 2})
JOIN = request_body({"allOf": [ref("NodeRequest")]}, {"node": 0, "name": "gpu-7", "claim": "a-secret-of-this-process"})

MEET = request_body({"allOf": [ref("RendezvousRequest")]}, {"address": "10.0.0.7", "port": 0})


class Runs(APIView):
    """Begin to report a run."""

    permission_classes = [IsAuthenticated, RequiresHttps]
    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="openRun",
        request=OPEN,
        responses={
            201: of("OpenedRun"),
            200: of("OpenedRun", "The existing run with this key, and a new run token."),
            **refusals(403, 415, 422, 429),
        },
    )
    def post(self, request: Request) -> Response:
        """A run that somebody launched elsewhere: the board shows it, and starts nothing. It takes no slot."""
        asked = parse_request(RunRequest, request.data)
        opened = runs.open_run(user_of(request), asked)
        run, page = opened.attempt.job_id, reverse("job-detail", args=[opened.attempt.job_id])
        told: OpenedRun = {
            "run": run,
            "attempt": opened.attempt.number,
            "token": opened.token,
            "url": request.build_absolute_uri(page),
            "nodes": asked.nodes,
            "ranks_per_node": asked.world_size // asked.nodes,
        }
        return Response(told, status=201 if opened.new else 200, headers={"Cache-Control": "no-store"})


class OfRun(APIView):
    """What a run's own token may do."""

    authentication_classes = [RunTokenAuthentication]
    permission_classes = [IsAuthenticated, RequiresHttps]
    throttle_classes = ()  # how fast a node may speak is bounded in bytes

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, runs.RunEndedError):
            ended: RunEndedProblem = {**details(410, [Problem("run", str(exc))]), "cancel": exc.cancel}
            return refused(ended)
        if isinstance(exc, runs.NodeTakenError):
            return refuse(409, "node", str(exc), "body")
        if isinstance(exc, BadMessageError):
            return refuse(422, "message", str(exc))
        if isinstance(exc, TooFastError):
            words = f"The node sends data too fast. Wait {exc.wait_s:.1f} s."
            return refused(of_request(429, words), {"Retry-After": str(math.ceil(exc.wait_s))})
        if isinstance(exc, RedisError):
            log.warning("Cannot store telemetry: %s", exc)
            return refused(
                of_request(
                    503, "Redis does not answer, so Meshboard may not have stored the data. Send the data again."
                ),
                LATER,
            )
        return super().handle_exception(exc)

    def run(self, run: str, attempt: int) -> RunToken:
        """The token's attempt. Raises Http404 where the address is another's."""
        token = self.request.auth
        assert isinstance(token, RunToken), "the only way in"
        if (token.attempt.job_id, token.attempt.number) != (run, attempt):
            raise Http404("The token belongs to another run or attempt.")
        return token

    def member(self, run: str, attempt: int, node: int) -> Member:
        """The member that the request's claim speaks for. Raises MissingError, TakenError."""
        found = self.run(run, attempt).attempt.members.select_related("attempt__job").filter(node=node).first()
        if found is None or not found.claim:
            raise NotFoundError("node", f"no such node: node {node} has not joined this run")
        claim = self.request.headers.get("Meshboard-Claim", "")
        if not (claim.isascii() and hmac.compare_digest(hash_secret(claim), found.claim)):
            self.permission_denied(self.request, message=f"Another process reports for node {node} of this run.")
        return found


class Members(OfRun):
    """A node joins."""

    @extend_schema(
        operation_id="joinRun",
        request=JOIN,
        responses={200: of("NodeJoined"), **refusals(403, 404, 409, 410, 415, 422)},
    )
    def post(self, request: Request, run: str, attempt: int) -> Response:
        """From now on this process speaks for the node; the same claim again changes nothing."""
        token = self.run(run, attempt)
        member = runs.join_node(token, parse_request(NodeRequest, request.data))
        told: NodeJoined = {
            "node": member.node,
            "first_rank": member.first_rank,
            "num_ranks": member.num_ranks,
            "cancel": runs.must_end(member),
        }
        return Response(told)


class Batches(OfRun):
    """Telemetry."""

    parser_classes = [messages.MsgpackParser]

    @extend_schema(
        operation_id="sendBatch",
        request=messages.BATCH_BODY,
        parameters=[NUMBER, CLAIM],
        responses={200: of("ReportResponse"), **refusals(403, 404, 410, 415, 422, 429)},
    )
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """One msgpack `Batch` (contracts/telemetry/batches.py) of at most 256 KiB, of this node's ranks alone."""
        member = self.member(run, attempt, node)
        runs.check_running(member.attempt)
        number = _number(request)
        raw = _raw(request)
        if len(raw) > MAX_BATCH_BYTES:
            return refuse(413, "message", f"The batch has {len(raw):,} bytes. Send at most {MAX_BATCH_BYTES:,} bytes.")
        if problem := foreign(decode_batch(raw), member):
            return refuse(403, "message", problem)
        store_batch(NodeStream(run, attempt, node), number, raw, member.attempt.members.count())
        return _heard(member)


class Report(OfRun):
    """How a node stands."""

    parser_classes = [messages.MsgpackParser]

    @extend_schema(
        operation_id="reportRun",
        request=messages.REPORT_BODY,
        parameters=[CLAIM],
        responses={200: of("ReportResponse"), **refusals(403, 404, 410, 415, 422)},
    )
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """One msgpack `AttemptReport` (contracts/control.py), every few seconds and at the end; it may be deflated."""
        member = self.member(run, attempt, node)
        told = decode_report(_raw(request))
        named = {(told["job"], told["attempt"])} | (
            {(told["exit"]["job"], told["exit"]["attempt"])} if "exit" in told else set()
        )
        if named != {(run, attempt)}:
            return refuse(
                403, "message", "The run or attempt in the message differs from the run or attempt in the URL."
            )
        runs.store_report(member, told)
        return _heard(member)


class Meet(OfRun):
    """How a gang starts."""

    @extend_schema(
        operation_id="meetRun",
        request=MEET,
        parameters=[CLAIM],
        responses={200: of("RendezvousResponse"), **refusals(403, 404, 410, 415, 422)},
    )
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """A node of several says that it is ready, and where, or only asks who is; each answer tells the time."""
        member = self.member(run, attempt, node)
        runs.check_running(member.attempt)
        return Response(
            register_ready_node(member, parse_request(RendezvousRequest, request.data), cancel=runs.must_end(member))
        )


class GiveUp(APIView):
    """Wait no longer."""

    @extend_schema(
        operation_id="giveUpRun",
        request=None,
        responses={200: of("JobDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """A run from elsewhere that fell silent and will not speak again is lost. 409 while it speaks."""
        job = find_job_to_change(request.user, job_id)
        refuse_body(request)
        try:
            reconcile.mark_run_lost(job, request.user.get_username())
        except reconcile.RunConnectedError:
            return refuse(
                409,
                "status",
                f"The run {describe_status(job.status)}, and its host still sends reports. Cancel the run instead.",
            )
        return Response(serialize_job(find_job(request.user, job_id)))


def foreign(batch: Batch, member: Member) -> str:
    """Why a batch is not this member's to send; empty where it is."""
    if (batch["job"], batch["attempt"]) != (member.attempt.job_id, member.attempt.number):
        return f"The batch belongs to another attempt: attempt {batch['attempt']} of run {batch['job']}."
    own = range(member.first_rank, member.first_rank + member.num_ranks)
    for item in batch["items"]:
        if item["kind"] == "gap" or (item["kind"] in OF_NODES and item["rank"] == -1):
            continue
        if item["rank"] not in own:
            return f"Rank {item['rank']} is not on node {member.node}, which has ranks {own.start} to {own.stop - 1}."
    return ""


def _raw(request: Request) -> bytes:
    """What was sent; nothing where there was no body, which no parser is asked about."""
    told: Any = request.data
    return told if isinstance(told, bytes) else b""


def _number(request: Request) -> int:
    """The batch's. Raises BadParameterError."""
    told = request.query_params.get("n", "")
    number = parse_whole_number(told, 0, LARGEST_NUMBER)
    if number is None:
        words = f"The batch number `n` is missing or invalid. Use a whole number from 0 to {LARGEST_NUMBER}."
        raise BadParameterError([Problem("n", words)])
    return number


def _heard(member: Member) -> Response:
    with transaction.atomic():
        runs.record_contact(member)
        reconcile.mark_reachable(member)
    member.attempt.job.refresh_from_db(fields=["status"])
    return Response(ReportResponse(cancel=runs.must_end(member), status=member.attempt.job.status, now=time.time()))
