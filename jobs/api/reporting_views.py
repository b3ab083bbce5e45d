"""REST views for external runs. The token of a user opens a run, and the token of the run sends its reports."""

from __future__ import annotations

import hmac
import logging
import math
import time
from typing import Any

from django.db import transaction
from django.http import Http404
from django.urls import reverse
from drf_spectacular.utils import OpenApiParameter
from redis.exceptions import RedisError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from contracts.codec import MAX_BATCH_BYTES, MAX_REPORT_BYTES, BadMessageError, decode_batch, decode_report
from contracts.telemetry.batches import Batch
from jobs.api.access import SubmitThrottle
from jobs.api.errors import RETRY_LATER, RunEndedProblem, make_problem_response, refuse, reject_body
from jobs.api.openapi import describe_response, operation, ref, request_body
from jobs.api.parameters import BadParameterError
from jobs.api.parsers import MsgpackParser
from jobs.api.problems import build_problem, build_request_problem
from jobs.api.views import APIView, get_user
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

LARGEST_NUMBER = 2**53 - 1  # maximum batch number that Redis scripts count exactly
OF_NODES = ("log", "gauge", "start")  # kinds of items that a node also sends about itself, as rank -1
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
BATCH_BODY = {"application/msgpack": {"type": "string", "format": "binary", "maxLength": MAX_BATCH_BYTES}}
REPORT_BODY = {"application/msgpack": {"type": "string", "format": "binary", "maxLength": MAX_REPORT_BYTES}}
JOIN = request_body({"allOf": [ref("NodeRequest")]}, {"node": 0, "name": "gpu-7", "claim": "a-secret-of-this-process"})

MEET = request_body({"allOf": [ref("RendezvousRequest")]}, {"address": "10.0.0.7", "port": 0})


class OpenRunView(APIView):
    permission_classes = [IsAuthenticated, RequiresHttps]
    throttle_classes = [SubmitThrottle]

    @operation(
        "openRun",
        {
            201: describe_response("OpenedRun"),
            200: describe_response("OpenedRun", "The existing run with this key, and a new run token."),
        },
        415,
        422,
        request=OPEN,
    )
    def post(self, request: Request) -> Response:
        """Open a run that was launched outside Meshboard. The board shows the run, which occupies no slot."""
        run_request = parse_request(RunRequest, request.data)
        opened = runs.open_run(get_user(request), run_request)
        run, page = opened.attempt.job_id, reverse("job-detail", args=[opened.attempt.job_id])
        payload: OpenedRun = {
            "run": run,
            "attempt": opened.attempt.number,
            "token": opened.token,
            "url": request.build_absolute_uri(page),
            "nodes": run_request.nodes,
            "ranks_per_node": run_request.world_size // run_request.nodes,
        }
        return Response(payload, status=201 if opened.new else 200, headers={"Cache-Control": "no-store"})


class RunTokenView(APIView):
    authentication_classes = [RunTokenAuthentication]
    permission_classes = [IsAuthenticated, RequiresHttps]
    throttle_classes = ()  # bytes, not requests, limit the rate of a node

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, runs.RunEndedError):
            ended: RunEndedProblem = {**build_problem(410, [Problem("run", str(exc))]), "cancel": exc.cancel}
            return make_problem_response(ended)
        if isinstance(exc, runs.NodeTakenError):
            return refuse(409, "node", str(exc), "body")
        if isinstance(exc, BadMessageError):
            return refuse(422, "message", str(exc))
        if isinstance(exc, TooFastError):
            words = f"The node sends data too fast. Wait {exc.wait_s:.1f} s."
            return make_problem_response(build_request_problem(429, words), {"Retry-After": str(math.ceil(exc.wait_s))})
        if isinstance(exc, RedisError):
            log.warning("Cannot store telemetry: %s", exc)
            return make_problem_response(
                build_request_problem(
                    503, "Redis does not answer, so Meshboard may not have stored the data. Send the data again."
                ),
                RETRY_LATER,
            )
        return super().handle_exception(exc)

    def run(self, run: str, attempt: int) -> RunToken:
        """Return the attempt of the token. Raises Http404 if the address names another attempt."""
        token = self.request.auth
        assert isinstance(token, RunToken), "the only way in"
        if (token.attempt.job_id, token.attempt.number) != (run, attempt):
            raise Http404("The token belongs to another run or attempt.")
        return token

    def member(self, run: str, attempt: int, node: int) -> Member:
        """Return the member that the claim of the request identifies. Raises MissingError, TakenError."""
        found = self.run(run, attempt).attempt.members.select_related("attempt__job").filter(node=node).first()
        if found is None or not found.claim:
            raise NotFoundError("node", f"no such node: node {node} has not joined this run")
        claim = self.request.headers.get("Meshboard-Claim", "")
        if not (claim.isascii() and hmac.compare_digest(hash_secret(claim), found.claim)):
            self.permission_denied(self.request, message=f"Another process reports for node {node} of this run.")
        return found


class JoinRunView(RunTokenView):
    @operation("joinRun", "NodeJoined", 404, 409, 410, 415, 422, request=JOIN)
    def post(self, request: Request, run: str, attempt: int) -> Response:
        """Join a run as a node. A repeated request with the same claim changes nothing."""
        token = self.run(run, attempt)
        member = runs.join_node(token, parse_request(NodeRequest, request.data))
        payload: NodeJoined = {
            "node": member.node,
            "first_rank": member.first_rank,
            "num_ranks": member.num_ranks,
            "cancel": runs.must_end(member),
        }
        return Response(payload)


class BatchView(RunTokenView):
    parser_classes = [MsgpackParser]

    @operation("sendBatch", "ReportResponse", 404, 410, 415, 422, request=BATCH_BODY, parameters=[NUMBER, CLAIM])
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """Send one msgpack `Batch` (contracts/telemetry/batches.py) of this node's ranks, at most 256 KiB."""
        member = self.member(run, attempt, node)
        runs.check_running(member.attempt)
        number = _number(request)
        raw = _raw(request)
        if len(raw) > MAX_BATCH_BYTES:
            return refuse(413, "message", f"The batch has {len(raw):,} bytes. Send at most {MAX_BATCH_BYTES:,} bytes.")
        if problem := foreign(decode_batch(raw), member):
            return refuse(403, "message", problem)
        store_batch(NodeStream(run, attempt, node), number, raw, member.attempt.members.count())
        return _confirm_report(member)


class ReportView(RunTokenView):
    parser_classes = [MsgpackParser]

    @operation("reportRun", "ReportResponse", 404, 410, 415, 422, request=REPORT_BODY, parameters=[CLAIM])
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """Send one msgpack `AttemptReport` (contracts/control.py), every few seconds and at the end. Deflate is
        accepted.
        """
        member = self.member(run, attempt, node)
        report = decode_report(_raw(request))
        named = {(report["job"], report["attempt"])} | (
            {(report["exit"]["job"], report["exit"]["attempt"])} if "exit" in report else set()
        )
        if named != {(run, attempt)}:
            return refuse(
                403, "message", "The run or attempt in the message differs from the run or attempt in the URL."
            )
        runs.store_report(member, report)
        return _confirm_report(member)


class RendezvousView(RunTokenView):
    @operation("meetRun", "RendezvousResponse", 404, 410, 415, 422, request=MEET, parameters=[CLAIM])
    def post(self, request: Request, run: str, attempt: int, node: int) -> Response:
        """Report that a node is ready to start, or only ask which nodes are ready. The response has the time."""
        member = self.member(run, attempt, node)
        runs.check_running(member.attempt)
        return Response(
            register_ready_node(member, parse_request(RendezvousRequest, request.data), cancel=runs.must_end(member))
        )


class MarkRunLostView(APIView):
    @operation("giveUpRun", "JobDetail", 404, 409, 415, 422)
    def post(self, request: Request, job_id: str) -> Response:
        """Mark a silent external run as lost. 409: its host still sends reports."""
        job = find_job_to_change(request.user, job_id)
        reject_body(request)
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
    """Return why this member may not send a batch, or an empty text if it may."""
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
    """Return the request body, empty if there is none, because then no parser runs."""
    data: Any = request.data
    return data if isinstance(data, bytes) else b""


def _number(request: Request) -> int:
    """Return the number of a batch from the query. Raises BadParameterError."""
    text = request.query_params.get("n", "")
    number = parse_whole_number(text, 0, LARGEST_NUMBER)
    if number is None:
        words = f"The batch number `n` is missing or invalid. Use a whole number from 0 to {LARGEST_NUMBER}."
        raise BadParameterError([Problem("n", words)])
    return number


def _confirm_report(member: Member) -> Response:
    with transaction.atomic():
        runs.record_contact(member)
        reconcile.mark_reachable(member)
    member.attempt.job.refresh_from_db(fields=["status"])
    return Response(ReportResponse(cancel=runs.must_end(member), status=member.attempt.job.status, now=time.time()))
