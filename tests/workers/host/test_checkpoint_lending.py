"""Sending a checkpoint to another host."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from pathlib import Path

import pytest

from contracts.codec import validate_lend_order, validate_loan_address
from contracts.control import ResumeCheckpoint
from contracts.names import LOAN_FILE, cancel_key, loan_key
from tests.support.processes import RedisServer, scale_timeout, wait_until
from tests.workers.checkpoint.test_transfer import LEAST, SECRET, publish
from tests.workers.host.supervisor.test_multi_host import ADDRESSES, LOOPBACK_6, settings_of
from workers.checkpoint import folder
from workers.checkpoint.transfer import borrow
from workers.host.attempts import AttemptDir
from workers.host.checkpoint_lending import CheckpointSenderPool
from workers.host.settings import HostSettings
from workers.host.supervisor.multi_host import deliver_loan
from workers.host.supervisor.redis_transport import RedisTransport


def threads(job: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"lend-{job}"]


def handed(folder: Path, settings: HostSettings) -> Path:
    """Return the file that the supervisor writes for rank 0."""

    async def ask() -> None:
        line = RedisTransport(AttemptDir(folder, "job", 2), settings)
        stored = ResumeCheckpoint(name="job/1/step-00000020", host="host-0", lent=SECRET)
        async with asyncio.timeout(scale_timeout(20)):
            await deliver_loan(line, stored, folder, None)
        await line.close()

    asyncio.run(ask())
    return folder / LOAN_FILE


@pytest.mark.parametrize("addresses", [ADDRESSES, LOOPBACK_6], ids=["IPv4", "IPv6"])
def test_sends_a_checkpoint_once_and_stops_on_cancel(
    redis_service: RedisServer, tmp_path: Path, addresses: tuple[str, str]
) -> None:
    lends, wants = (settings_of(node, tmp_path, redis_service.url, addresses) for node in (0, 1))
    for one in (lends, wants):
        one.run_dir.mkdir(parents=True)
    publish(lends.checkpoint_root / "job", 1, 20)
    lender, client = CheckpointSenderPool(lends), redis_service.client()
    result = {"v": 1, "job": "job", "attempt": 2, "secret": SECRET, "expires": 0.0, "owner": 1}
    order = validate_lend_order(result)
    lender.send(order)
    loan = handed(tmp_path, wants)
    assert stat.S_IMODE(loan.stat().st_mode) == 0o600
    assert validate_loan_address(json.loads(loan.read_text()))["address"] == lends.address
    lender.send(order)
    wait_until(lambda: len(threads("job")) == 1, "the second sees that there is one", 20)
    assert borrow(wants.checkpoint_root / "job", loan, LEAST, None, 2).problem == ""
    assert folder.list_complete(wants.checkpoint_root)
    wait_until(lambda: not threads("job"), "it has sent it", 20)
    again = validate_lend_order({**result, "attempt": 3})
    lender.send(again)
    wait_until(lambda: client.exists(loan_key("host-0", "job", 3)), "it lends again", 20)
    client.set(cancel_key("job", 3), 1)
    wait_until(lambda: not threads("job"), "it ends with the attempt", 20)
    assert list(lends.run_dir.iterdir()) == []
