"""Asks the supervisors of a running attempt for the events of a step."""

from __future__ import annotations

from contextlib import closing

from redis.exceptions import RedisError

from contracts.names import requested_timelines_key
from jobs.core.redis_connection import connect
from jobs.models import Job
from jobs.runs.traces.stream import AwayError

LASTS_S = 3600
MOST = 64  # steps asked for and not forgotten


class FullError(RuntimeError):
    """So many steps are asked for already."""


def ask(job: Job, step: int) -> list[int]:
    """Put a step on the list; the whole list, in order.

    Raises:
        AwayError: Redis could not be reached.
        FullError: MOST steps stand on it.
    """
    key = requested_timelines_key(job.id, job.attempt)
    try:
        with closing(connect()) as client:
            found = {int(member) for member in client.smembers(key)}
            if len(found | {step}) > MOST:
                raise FullError(
                    f"Traces of {MOST} steps are already requested, the maximum. Requests expire after one hour."
                )
            pipe = client.pipeline()
            pipe.sadd(key, step)
            pipe.expire(key, LASTS_S)
            pipe.execute()
    except (RedisError, OSError) as error:
        raise AwayError(str(error)) from error
    return sorted(found | {step})
