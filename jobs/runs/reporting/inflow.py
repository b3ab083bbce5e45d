"""Telemetry that came over HTTPS, put into its member's stream under the bounds of a host's.

One script in Redis does it at once: whatever web process takes a batch, each number is taken once, none too fast, and
the stream stays below its bound.
"""

from __future__ import annotations

import time
from functools import cache, lru_cache
from typing import Any, NamedTuple

import redis
from django.conf import settings

from contracts.names import telemetry_stream
from jobs.core.redis_connection import connect

STREAM_BYTES = 32 * 2**20  # of a member's telemetry, as MESHBOARD_STREAM_BYTES of a host by default
RUN_BYTES = 256 * 2**20  # of all members together, who have equal shares of it
FEWEST_BYTES = 512 * 2**10  # of a member all the same: two of the largest batches
FULL = 0.7  # of what Redis may hold: beyond it the rest is for hosts, jobs and pages
FULL_WAIT_S, ASK_EVERY_S = 10.0, 1.0
STREAM_KEPT_S = 24 * 3600  # after the last batch
BYTES_PER_S, BURST_BYTES = 2**20, 16 * 2**20  # of one member
BATCH_COST = 8 * 2**10  # what a batch counts beside its bytes: 128 small ones a second

# KEYS: the stream; what is known of it. ARGV: batch, its number, bytes it counts, rate, burst, bound, seconds kept.
# Answers 0 taken, -1 known already, else milliseconds to wait.
TAKE = """
local now = redis.call('TIME')
now = tonumber(now[1]) + tonumber(now[2]) / 1e6
local known = redis.call('HMGET', KEYS[2], 'next', 'bytes', 'level', 'at')
local number, cost, rate, burst = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if known[1] and number < tonumber(known[1]) then return -1 end
local level = burst
if known[3] then
  level = math.min(burst, tonumber(known[3]) + math.max(0, now - tonumber(known[4])) * rate)
end
if level < cost then return math.ceil((cost - level) / rate * 1000) end
local bytes = (tonumber(known[2]) or 0) + #ARGV[1]
redis.call('XADD', KEYS[1], '*', 'b', ARGV[1], 'n', number)
while bytes > tonumber(ARGV[6]) do
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  if not oldest then bytes = 0 break end
  redis.call('XDEL', KEYS[1], oldest[1])
  bytes = bytes - #oldest[2][2]
end
redis.call('HSET', KEYS[2], 'next', number + 1, 'bytes', bytes, 'level', tostring(level - cost), 'at', tostring(now))
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('EXPIRE', KEYS[2], ARGV[7])
return 0
"""


class Place(NamedTuple):
    """A member's stream."""

    job: str
    attempt: int
    node: int

    def most_bytes(self, nodes: int) -> int:
        """That it may have, of a run of so many."""
        return min(STREAM_BYTES, max(FEWEST_BYTES, RUN_BYTES // nodes))


class TooFastError(Exception):
    """More than a member may send: to be said again after `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"{wait_s:.1f} s")
        self.wait_s = wait_s


def put(place: Place, number: int, batch: bytes, nodes: int = 1) -> None:
    """Batch `number` of a member of a run of `nodes`, msgpack. One that was taken before changes nothing.

    Raises:
        TooFastError: not taken.
        RedisError: not taken, or it is not known.
    """
    if _is_full(int(time.monotonic() / ASK_EVERY_S), settings.REDIS_URL):
        raise TooFastError(FULL_WAIT_S)
    keys = [telemetry_stream(*place), "meshboard:reported:{}:{}:{}".format(*place)]
    cost = len(batch) + BATCH_COST
    bounds = [cost, BYTES_PER_S, BURST_BYTES, place.most_bytes(nodes), STREAM_KEPT_S]
    told: Any = client().eval(TAKE, len(keys), *keys, batch, number, *bounds)
    if int(told) > 0:
        raise TooFastError(int(told) / 1000)


def client() -> redis.Redis:
    """The web's own connection for what runs say."""
    return _client(settings.REDIS_URL)


@lru_cache(maxsize=1)
def _is_full(_when: int, _url: str) -> bool:
    """Whether Redis has little room left, by what it may hold; never where nobody set a bound."""
    told: Any = client().info("memory")
    return bool(0 < FULL * told["maxmemory"] < told["used_memory"])


@cache
def _client(_url: str) -> redis.Redis:
    """Kept: a connection for each batch would cost more than the batch."""
    return connect()
