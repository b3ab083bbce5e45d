"""The start of a gang whose members speak over HTTPS: who is ready, and where, as hosts of ours keep it in Redis."""

from __future__ import annotations

import json
from typing import Any

from contracts.names import gang_key
from jobs.models import Member
from jobs.runs.reporting.inflow import STREAM_KEPT_S, client
from jobs.runs.reporting.requests import MeetRequest, Met, ReadyNode


def meet(member: Member, asked: MeetRequest, *, cancel: bool) -> Met:
    """Take in that a member is ready, where it says so, and tell who is. Raises RedisError."""
    key = gang_key(member.attempt.job_id, member.attempt.number)
    with client().pipeline(transaction=True) as pipe:
        if asked.address is not None:
            pipe.hset(key, str(member.node), json.dumps({"address": asked.address, "port": asked.port}))
            pipe.expire(key, STREAM_KEPT_S)
        pipe.time()
        pipe.hgetall(key)
        told: Any = pipe.execute()
    (seconds, microseconds), ready = told[-2:]
    nodes: list[ReadyNode] = []
    for node, where in ready.items():
        said = json.loads(where)
        nodes.append({"node": int(node), "address": said["address"], "port": said["port"]})
    return {"cancel": cancel, "now": seconds + microseconds / 1e6, "ready": nodes}
