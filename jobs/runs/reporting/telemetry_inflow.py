"""Put telemetry that arrives over HTTPS into Redis, within the limits of a host.

A Lua script makes each update atomic: each batch is stored once, at a bounded rate, in a bounded stream.
"""

from __future__ import annotations

import json
import time
from functools import cache, lru_cache
from typing import Any, NamedTuple

import redis
from django.conf import settings

from contracts.names import gang_key, telemetry_stream
from jobs.core.redis_client import connect
from jobs.models import Member
from jobs.runs.reporting.requests import ReadyNode, RendezvousRequest, RendezvousResponse

MAX_STREAM_BYTES = 32 * 2**20  # per node, as the default of MESHBOARD_STREAM_BYTES on a host
MAX_RUN_BYTES = 256 * 2**20  # of all nodes in equal shares
MIN_STREAM_BYTES = 512 * 2**10  # two of the largest batches
MAX_REDIS_USE = 0.7  # of maxmemory: the rest is for hosts, jobs, and pages
FULL_RETRY_AFTER_S, MEMORY_CHECK_INTERVAL_S = 10.0, 1.0
STREAM_LIFETIME_S = 24 * 3600  # after the last batch
BYTES_PER_S, BURST_BYTES = 2**20, 16 * 2**20  # per node
BATCH_COST_BYTES = 8 * 2**10  # in addition to its size, which allows 128 small batches per second

# KEYS: the stream, its bookkeeping. ARGV: batch, number, cost in bytes, rate, burst, maximum bytes, lifetime (s).
# Returns 0 if stored, -1 if known, or else the milliseconds to wait.
STORE_SCRIPT = """
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


class NodeStream(NamedTuple):
    """Identify the telemetry stream of a node."""

    job: str
    attempt: int
    node: int

    def get_max_bytes(self, nodes: int) -> int:
        """Return the maximum bytes of the stream in a run of `nodes` nodes."""
        return min(MAX_STREAM_BYTES, max(MIN_STREAM_BYTES, MAX_RUN_BYTES // nodes))


class TooFastError(Exception):
    """A node sends too much. It must retry after `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"{wait_s:.1f} s")
        self.wait_s = wait_s


def store_batch(place: NodeStream, number: int, batch: bytes, nodes: int = 1) -> None:
    """Store a batch of a node in a run of `nodes` nodes. A known batch changes nothing.

    Raises:
        TooFastError: The batch was not stored.
        RedisError: The batch may not be stored.
    """
    if _is_full(int(time.monotonic() / MEMORY_CHECK_INTERVAL_S), settings.REDIS_URL):
        raise TooFastError(FULL_RETRY_AFTER_S)
    keys = [telemetry_stream(*place), "meshboard:reported:{}:{}:{}".format(*place)]
    cost = len(batch) + BATCH_COST_BYTES
    bounds = [cost, BYTES_PER_S, BURST_BYTES, place.get_max_bytes(nodes), STREAM_LIFETIME_S]
    result: Any = get_client().eval(STORE_SCRIPT, len(keys), *keys, batch, number, *bounds)
    if int(result) > 0:
        raise TooFastError(int(result) / 1000)


def get_client() -> redis.Redis:
    """Return the connection for telemetry of external runs."""
    return _client(settings.REDIS_URL)


@lru_cache(maxsize=1)
def _is_full(_when: int, _url: str) -> bool:
    """Return True if Redis uses most of its `maxmemory`. False without `maxmemory`."""
    memory: Any = get_client().info("memory")
    return bool(0 < MAX_REDIS_USE * memory["maxmemory"] < memory["used_memory"])


@cache
def _client(_url: str) -> redis.Redis:
    """Cache the connection, because connecting costs more than a batch."""
    return connect()


def register_ready_node(member: Member, request: RendezvousRequest, *, cancel: bool) -> RendezvousResponse:
    """Store the address of a ready node if given, and return all ready nodes of the gang. Raises RedisError."""
    key = gang_key(member.attempt.job_id, member.attempt.number)
    with get_client().pipeline(transaction=True) as pipe:
        if request.address is not None:
            pipe.hset(key, str(member.node), json.dumps({"address": request.address, "port": request.port}))
            pipe.expire(key, STREAM_LIFETIME_S)
        pipe.time()
        pipe.hgetall(key)
        replies: Any = pipe.execute()
    (seconds, microseconds), ready = replies[-2:]
    nodes: list[ReadyNode] = []
    for node, encoded in ready.items():
        address = json.loads(encoded)
        nodes.append({"node": int(node), "address": address["address"], "port": address["port"]})
    return {"cancel": cancel, "now": seconds + microseconds / 1e6, "ready": nodes}
