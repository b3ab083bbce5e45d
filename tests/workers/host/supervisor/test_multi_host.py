"""Multi-host jobs: common start, store of the leader, and lease."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from contracts.codec import BadMessageError, validate_launch_order
from contracts.control import VERSION, Gang, LaunchOrder, Node, get_local_ranks, get_world_size
from tests.support.processes import RedisServer, scale_timeout, wait_until
from workers.host.attempts import AttemptDir, claim_attempt
from workers.host.hardware import find_interface, get_address_towards
from workers.host.job_limits import JobLimits
from workers.host.processes import find_processes, kill_processes
from workers.host.rank_files import read_failure
from workers.host.settings import HostSettings
from workers.host.supervisor.multi_host import (
    GangLease,
    LauncherTimeouts,
    NotReadyError,
    coordinate_start,
    wait_for_members,
)
from workers.host.supervisor.publisher import BoardClock, ReadyMember, TransportError
from workers.host.supervisor.redis_transport import RedisTransport
from workers.host.supervisor.torchrun_process import TorchrunProcess

# Two hosts on one machine need two loopback addresses.
ADDRESSES = ("127.0.0.2", "127.0.0.3")
HASTE = LauncherTimeouts(0.05, 0.1, 0.01)
LOOPBACK_6 = ("::1", "::1")  # IPv6 has only one loopback address
# Rank 1 fails after the test has inspected it. Rank 0 waits for rank 1.
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
told = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
with open(f"{sys.argv[1]}.{rank}.draft", "w") as out:
    json.dump(told, out)
os.rename(f"{sys.argv[1]}.{rank}.draft", f"{sys.argv[1]}.{rank}")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
if rank == 1:
    raise ValueError("boom")
dist.all_reduce(torch.ones(1 << 20))
"""


def nodes_at(addresses: tuple[str, str]) -> list[Node]:
    return [Node(host=f"host-{node}", address=address, ranks=1) for node, address in enumerate(addresses)]


NODES = nodes_at(ADDRESSES)


def make_order(node: int, lease_s: float = 3600, addresses: tuple[str, str] = ADDRESSES) -> LaunchOrder:
    spec = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "script.py", "args": []}}
    gang = Gang(node=node, nodes=nodes_at(addresses), lease_s=lease_s)
    return LaunchOrder(v=VERSION, job="gang", attempt=1, spec=spec, slots=[0], expires=0.0, gang=gang)


def settings_of(node: int, folder: Path, redis_url: str, addresses: tuple[str, str] = ADDRESSES) -> HostSettings:
    roots = [folder / f"host-{node}" / name for name in ("runs", "data", "checkpoints", "scripts")]
    return HostSettings(redis_url, f"host-{node}", 2, "cpu", *roots, "workers.trainer", address=addresses[node])  # type: ignore[call-arg]


def lines(server: RedisServer, folder: Path) -> list[RedisTransport]:
    return [
        RedisTransport(AttemptDir(folder, "gang", 1), settings_of(node, folder, server.url), node) for node in (0, 1)
    ]


def test_assigns_ranks_to_nodes_in_order() -> None:
    order = make_order(1)
    order["gang"]["nodes"] = [
        Node(host=name, address="", ranks=ranks) for name, ranks in (("a", 4), ("b", 2), ("c", 1))
    ]
    order["slots"] = [5, 6]
    assert list(get_local_ranks(order)) == [4, 5]
    assert get_world_size(order) == 7


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"node": 2}, "gang.node"), ({"nodes": NODES[:1]}, "gang.nodes"), ({"nodes": [NODES[0]] * 2, "node": 7}, "gang")],
)
def test_rejects_an_order_with_an_invalid_node(wrong: dict[str, Any], field: str) -> None:
    order = {**make_order(0), "gang": {**make_order(0)["gang"], **wrong}}
    with pytest.raises(BadMessageError, match=field):
        validate_launch_order(order)
    more = {**make_order(0), "slots": [0, 1]}
    with pytest.raises(BadMessageError, match="slots has 2 entries, but the number of local ranks is 1"):
        validate_launch_order(more)


def test_all_members_get_the_leader_although_redis_loses_data(redis_service: RedisServer, tmp_path: Path) -> None:
    async def main() -> list[ReadyMember]:
        first, second = lines(redis_service, tmp_path)
        waiting = asyncio.create_task(wait_for_members(first, make_order(0), ReadyMember(ADDRESSES[0], 4711)))
        await asyncio.to_thread(wait_until, lambda: redis_service.client().keys("meshboard:gang:*"), "one is ready")
        redis_service.client().flushall()
        assert not waiting.done()
        met = await wait_for_members(second, make_order(1), ReadyMember(ADDRESSES[1], 0))
        both = [await waiting, met]
        await first.close()
        await second.close()
        return both

    assert asyncio.run(main()) == [ReadyMember(ADDRESSES[0], 4711)] * 2


def test_names_missing_members(redis_service: RedisServer, tmp_path: Path) -> None:
    async def main(url: str) -> None:
        line = RedisTransport(AttemptDir(tmp_path, "gang", 1), settings_of(0, tmp_path, url), 0)
        await wait_for_members(line, make_order(0), ReadyMember(ADDRESSES[0], 1), timeout_s=0.3)

    with pytest.raises(NotReadyError, match=r"host host-1 was not ready within 0 s"):
        asyncio.run(main(redis_service.url))
    redis_service.stop()
    with pytest.raises(NotReadyError, match="cannot reach the board"):
        asyncio.run(main(redis_service.url))
    redis_service.start()


@pytest.mark.parametrize("messages", [b"", b"{}\n", b'{"port": "x"}\n', b'{"port": 70000}\n', b"[" * 6000, b"\xff\n"])
def test_ignores_an_invalid_launcher_message(messages: bytes) -> None:
    actual, expected = socket.socketpair()
    expected.sendall(messages)
    expected.shutdown(socket.SHUT_WR)

    async def lead_of(own: ReadyMember) -> ReadyMember:
        raise AssertionError("it said no port")

    asyncio.run(coordinate_start(actual, make_order(0)["gang"], ADDRESSES[0], lead_of, lambda: False))
    expected.settimeout(5)
    assert expected.recv(10) == b""


@pytest.mark.parametrize(
    ("node", "messages", "text"),
    [
        (0, b"", "host host-0 did not answer within 0 s"),
        (1, b"", "host host-1 could not connect to host host-0 within 0 s"),
        (1, b'{"met": true}\n', "host host-1 did not answer within 0 s"),
    ],
    ids=["it leads", "it follows", "it met them"],
)
def test_names_a_launcher_that_stops_responding(node: int, messages: bytes, text: str) -> None:
    actual, expected = socket.socketpair()
    expected.sendall(b'{"port": 7}\n' + messages)

    async def lead_of(own: ReadyMember) -> ReadyMember:
        return own

    with expected, pytest.raises(NotReadyError, match=f"^{text}$"):
        asyncio.run(coordinate_start(actual, make_order(node)["gang"], ADDRESSES[node], lead_of, lambda: False, HASTE))


def test_stops_checking_the_launcher_after_the_start() -> None:
    actual, expected = socket.socketpair()
    expected.sendall(b'{"port": 7}\n{"met": true}\n')

    async def lead_of(own: ReadyMember) -> ReadyMember:
        return own

    with expected:
        asyncio.run(coordinate_start(actual, make_order(1)["gang"], ADDRESSES[1], lead_of, lambda: True, HASTE))
        assert expected.recv(100) == b'{"address": "127.0.0.3", "port": 7}\n'
        assert expected.recv(1) == b"", "it hung up"


def test_only_a_gang_has_a_lease_which_contact_renews() -> None:
    alone = make_order(0)
    del alone["gang"]
    lease, forever = GangLease(make_order(0, lease_s=0.05)), GangLease(alone)
    wait_until(lease.is_expired, "the lease is over", 5, 0.01)
    assert not forever.is_expired()
    lease.renew()
    assert not lease.is_expired()


def test_clock_offset_is_within_the_stated_error() -> None:
    delays, took = iter([0.03, 0.002, 0.05, 0.01, 0.04, 0.02, 0.03, 0.06]), []

    async def ask() -> float:
        began = time.monotonic()
        await asyncio.sleep(next(delays))  # all of the delay is on the way there, the worst case
        took.append(time.monotonic() - began)
        return time.time() - 300.0

    clock = BoardClock()
    assert clock.to_message() is None
    asyncio.run(clock.measure(ask))
    told = clock.to_message()
    assert told is not None
    assert told["within_s"] < sorted(took)[1], "the quickest exchange counts"
    assert abs(told["offset_s"] + 300.0) <= told["within_s"] + 0.001
    assert abs(clock.get_time() - (time.time() - 300.0)) < told["within_s"] + 1


def test_clock_stays_unchanged_while_the_board_is_unreachable() -> None:
    async def ask() -> float:
        raise TransportError("away")

    clock = BoardClock()
    with pytest.raises(TransportError):
        asyncio.run(clock.measure(ask))
    assert clock.to_message() is None
    assert clock.offset_s == 0


def test_finds_the_address_towards_redis() -> None:
    assert get_address_towards("redis://:secret@127.0.0.1:1234/0") == "127.0.0.1"
    assert get_address_towards("unix:///run/redis.sock") == "127.0.0.1"
    assert get_address_towards("redis://no-such-host.invalid/0") == "127.0.0.1"
    assert find_interface("127.0.0.1") == find_interface("::1") == "lo"
    assert find_interface("203.0.113.9") is None


class Both:
    """The results of two members of one gang."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        self.addresses = addresses
        self.told: dict[int, dict[str, str]] = {}
        self.listening: set[str] = set()
        self.failures: list[Any] = []
        self.lead_after: list[int] = []


@pytest.fixture(scope="module", params=[ADDRESSES, LOOPBACK_6], ids=["IPv4", "IPv6"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Run two members on two addresses of this machine, and let one of two ranks fail."""
    folder = tmp_path_factory.mktemp("gang")
    found, members = Both(request.param), []
    for node in (0, 1):
        settings = settings_of(node, folder, "", found.addresses)
        settings.script_root.mkdir(parents=True)
        (settings.script_root / "script.py").write_text(SCRIPT)
        order = make_order(node, addresses=found.addresses)
        order["spec"]["script"]["args"] = [str(folder / "told"), str(folder / "go")]
        attempt = claim_attempt(settings.run_dir, order)
        assert attempt is not None
        members.append(
            (
                attempt,
                settings,
                TorchrunProcess(
                    attempt,
                    order,
                    settings,
                    str(folder / "nobody-listens"),
                    JobLimits(attempt, settings, has_own_user=False),
                ),
            )
        )
    ready: dict[int, ReadyMember] = {}

    async def lead_of(node: int, own: ReadyMember) -> ReadyMember:
        ready[node] = own
        while len(ready) < 2:
            await asyncio.sleep(0.02)
        return ready[0]

    def look() -> None:
        for rank in range(2):
            path = folder / f"told.{rank}"
            found.told[rank] = json.loads(wait_until(lambda path=path: path.exists() and path.read_text(), "told", 90))
        for pid in find_processes("gang", 1):
            connections = psutil.Process(pid).net_connections("inet")
            found.listening |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}

    async def work() -> None:
        for _, _, training in members:
            await training.start()
        meetings = [
            asyncio.create_task(
                coordinate_start(
                    training.launcher,
                    make_order(node)["gang"],
                    settings.address,
                    lambda own, node=node: lead_of(node, own),
                    lambda: False,
                    LauncherTimeouts(interval_s=0.1),
                )
            )
            for node, (_, settings, training) in enumerate(members)
        ]
        waits = [asyncio.create_task(training.wait()) for _, _, training in members]
        try:
            await asyncio.to_thread(look)
        finally:
            (folder / "go").touch()
        await asyncio.wait_for(waits[1], scale_timeout(60))
        # One member's end cleans up its own processes and none of the other member on this machine.
        found.lead_after = find_processes("gang", 1, members[0][0].run_dir)
        await asyncio.wait_for(asyncio.gather(*waits, *meetings), scale_timeout(60))

    try:
        asyncio.run(work())
        found.failures = [
            read_failure(attempt, get_local_ranks(make_order(node))) for node, (attempt, _, _) in enumerate(members)
        ]
        yield found
    finally:
        kill_processes("gang", 1)
    assert find_processes("gang", 1) == []


def test_each_rank_gets_its_number_and_the_leader_store(both: Both) -> None:
    assert [both.told[rank]["LOCAL_RANK"] for rank in range(2)] == ["0", "0"]
    assert {told["WORLD_SIZE"] for told in both.told.values()} == {"2"}
    assert {told["MASTER_ADDR"] for told in both.told.values()} == {both.addresses[0]}
    assert len({told["MASTER_PORT"] for told in both.told.values()}) == 1


def test_store_listens_only_on_the_leader_address(both: Both) -> None:
    assert both.addresses[0] in both.listening
    assert both.listening <= {*both.addresses, "127.0.0.1", "::1"}, "never on all interfaces"


def test_only_the_failed_member_reports_the_cause(both: Both) -> None:
    first, second = both.failures
    assert (second.rank, second.exit_code, second.lost_peer) == (1, 1, False)
    assert second.message == "ValueError: boom"
    assert first is None or first.lost_peer
    assert time.time() - 120 < second.time <= time.time()


def test_members_on_one_machine_do_not_kill_each_other(both: Both) -> None:
    assert os.getpid() not in both.lead_after
    assert both.lead_after, "its launcher, at least, still ends its ranks"
