"""Provide joined hosts with their credentials and a connection to Redis."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import redis
from django.contrib.auth.models import User

from contracts.codec import validate_join_request
from contracts.hosts import JoinResponse
from contracts.security import build_signed_entry
from jobs.models import Member
from jobs.queue import actions
from jobs.queue import staff_actions as staff
from jobs.queue.hosts import joining
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.hosts.test_join import IDENTITIES, request
from tests.planner.wrong_specs import GOOD
from tests.support.processes import ROOT, base_environment, run_process
from workers.host.join import build_worker_command


class Guest(NamedTuple):
    """Host with its credentials and its connection to Redis."""

    name: str
    joined: JoinResponse
    redis: redis.Redis

    def signed(self, event: dict[str, Any]) -> Any:
        return build_signed_entry(bytes.fromhex(self.joined["key"]), msgpack.packb(event))


def admitted(name: str, identity: str = IDENTITIES[0]) -> Guest:
    token = joining.create_token("staff", joining.JoinTokenRequest())[1]
    joined, _ = staff.join_host(validate_join_request(request(name, identity, token=token)), "127.0.0.1")
    return Guest(name, joined, redis.Redis.from_url(joined["redis_url"], socket_timeout=5))


def running_job(owner: User, host: str) -> str:
    """Create a job that is placed on this host."""
    job, _ = actions.submit(owner, {**GOOD, "resources": {"host": host}})
    schedule()
    assert Member.objects.get(attempt__job=job).host_name == host
    return job.id


@contextmanager
def worker(guest: Guest, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the worker of a joined host with its credentials."""
    environment = {
        **base_environment(),
        "MESHBOARD_REDIS_URL": guest.joined["redis_url"],
        "MESHBOARD_HOST_KEY": guest.joined["key"],
        "MESHBOARD_HOST_NAME": guest.name,
        "MESHBOARD_STATE_DIR": str(folder / "state"),
    }
    with run_process(build_worker_command(guest.name), environment, folder / "worker.log", ROOT) as process:
        yield process
