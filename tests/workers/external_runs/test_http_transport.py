"""The HTTP transport with a real board."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from contracts.codec import decode_batch, encode_batch
from contracts.control import AttemptReport
from contracts.names import telemetry_stream
from contracts.telemetry.batches import Batch
from contracts.telemetry.items import PhaseItem
from tests.support.processes import scale_timeout
from tests.support.web import TlsSite
from tests.workers.external_runs.relay import relay
from workers.external_runs.registration import BoardRun, RegistrationRequest, RunRegistration
from workers.host.supervisor.http_transport import (
    BadUrlError,
    BoardAnswer,
    BoardClient,
    HttpTransport,
    NoAnswerError,
    RunMember,
)
from workers.host.supervisor.publisher import MessageRefusedError, Publisher, TransportError
from workers.host.supervisor.telemetry_buffer import TelemetryBuffer as Waiting

PHASE = PhaseItem(kind="phase", rank=0, time=1.0, phase="step")


async def joined(at: TlsSite, board: BoardClient, result: list[str]) -> tuple[BoardRun, RunMember]:
    asked = RegistrationRequest(None, at.users["owner"]["token"], {"name": "a line", "world_size": 1})
    joining = RunRegistration(board, asked, result.append)
    run = await joining.open()
    return run, await joining.join(run, 0, "here")


def batch(run: str, **changes: Any) -> bytes:
    whole = Batch(v=1, job=run, attempt=1, time=1.0, items=[PHASE])
    return encode_batch({**whole, **changes})  # type: ignore[typeddict-item]


def items(at: TlsSite, run: str) -> list[Any]:
    entries: Any = at.redis.client().xrange(telemetry_stream(run, 1))
    return [item for _, fields in entries for item in decode_batch(fields[b"b"])["items"]]


def numbers(at: TlsSite, run: str) -> list[int]:
    entries: Any = at.redis.client().xrange(telemetry_stream(run, 1))
    return [int(fields[b"n"]) for _, fields in entries]


async def until_taken(work: Callable[[], Awaitable[None]]) -> None:
    """Repeat the call as a supervisor does."""
    async with asyncio.timeout(scale_timeout(30)):
        while True:
            try:
                return await work()
            except TransportError:
                await asyncio.sleep(0.05)


def test_resends_a_batch_after_a_lost_response_once(serving: TlsSite) -> None:
    result: list[str] = []

    async def main(port: int, deaf: Callable[[], None], hears: Callable[[], None]) -> str:
        board = BoardClient(f"https://127.0.0.1:{port}", serving.ca)
        run, who = await joined(serving, board, result)
        line = HttpTransport(board, who, result.append)
        await line.publish(batch(run.id))
        deaf()
        for _ in range(2):
            with pytest.raises(TransportError):
                await line.publish(batch(run.id))
        hears()
        await until_taken(lambda: line.publish(batch(run.id)))
        await until_taken(lambda: line.publish(batch(run.id)))
        await line.renew_stream()
        await line.close()
        return run.id

    with relay(serving.port) as way:
        run = asyncio.run(main(way.port, way.deaf.set, way.deaf.clear))
        assert way.lost >= 1, "the board took what it was asked"
    assert numbers(serving, run) == [0, 1, 2]
    assert [words.split(" (")[0] for words in result] == ["The board does not answer", "The board answers again."]


class Refusing(BoardClient):
    """A client that fails with `troubles`, each None or a response, and then accepts batches."""

    def __init__(self, at: TlsSite, troubles: list[BoardAnswer | None]) -> None:
        super().__init__(at.url, at.ca)
        self._troubles = troubles

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> BoardAnswer:
        if "batches" not in path or not self._troubles:
            return super().post(path, body, headers)
        trouble = self._troubles.pop(0)
        if trouble is None:
            raise NoAnswerError("connection refused")
        return trouble


def test_keeps_a_batch_while_the_board_is_unreachable_or_busy(serving: TlsSite) -> None:
    """Check a batch that waits while the board is unreachable and then busy."""

    async def main() -> str:
        board = Refusing(serving, [None, BoardAnswer(503, {}, 0.0)])
        run, who = await joined(serving, board, [])
        waiting = Waiting()
        publisher = Publisher(run.id, 1, waiting, HttpTransport(board, who, print))
        async with asyncio.timeout(scale_timeout(30)):
            for number in (1.0, 2.0, 3.0):
                waiting.add({**PHASE, "time": number})
                sent = await publisher.send()
            while not sent:
                await asyncio.sleep(0.05)
                sent = await publisher.send()
        board.close()
        return run.id

    run = asyncio.run(main())
    assert [item["time"] for item in items(serving, run)] == [1.0, 2.0, 3.0]
    assert numbers(serving, run) == [0, 1]


def test_keeps_one_connection_open(serving: TlsSite) -> None:
    async def main(port: int) -> None:
        board = BoardClient(f"https://127.0.0.1:{port}", serving.ca)
        run, who = await joined(serving, board, [])
        line = HttpTransport(board, who)
        for _ in range(20):
            await line.publish(batch(run.id))
        await line.close()

    with relay(serving.port) as way:
        asyncio.run(main(way.port))
        assert way.opened == 1


def test_uses_the_proxy_without_showing_the_token(serving: TlsSite, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay(serving.port) as way:
        monkeypatch.setenv("https_proxy", f"http://me:pass@127.0.0.1:{way.port}")
        monkeypatch.setenv("no_proxy", "")
        asyncio.run(joined(serving, BoardClient(serving.url, serving.ca), []))
        assert way.asked[0].startswith(f"CONNECT 127.0.0.1:{serving.port}".encode())
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        before = way.opened
        asyncio.run(joined(serving, BoardClient(serving.url, serving.ca), []))
        assert way.opened == before


def test_rejected_items_become_a_gap(serving: TlsSite) -> None:
    async def main() -> str:
        board = BoardClient(serving.url, serving.ca)
        run, who = await joined(serving, board, [])
        line, waiting = HttpTransport(board, who), Waiting()
        waiting.add({**PHASE, "rank": 7})
        publisher = Publisher(run.id, 1, waiting, line)
        assert not await publisher.send()
        assert not line.ended
        waiting.add(PHASE)
        assert await publisher.send(), "later batches are accepted"
        await line.close()
        return run.id

    kinds = [item["kind"] for item in items(serving, asyncio.run(main()))]
    assert kinds == ["gap", "phase"]


def test_sends_nothing_after_the_run_has_ended(serving: TlsSite) -> None:
    result: list[str] = []

    async def main() -> None:
        board = BoardClient(serving.url, serving.ca)
        run, who = await joined(serving, board, result)
        first, second = HttpTransport(board, who), HttpTransport(board, who, result.append)
        running = AttemptReport(job=run.id, attempt=1, state="running", slots=[])
        await second.send_report(running)
        assert not await second.is_cancelled()
        ended: Any = {
            "v": 1,
            "job": run.id,
            "attempt": 1,
            "outcome": "succeeded",
            "reason": "",
            "exit_code": 0,
            "rank": None,
            "signal": None,
            "log_tail": [],
            "started": 0.0,
            "finished": 1.0,
            "summary": None,
        }
        await first.send_report({**running, "state": "exited", "exit": ended})
        await first.send_report({**running, "state": "exited", "exit": ended})
        for _ in range(3):
            with pytest.raises(MessageRefusedError):
                await second.send_report(running)
        assert second.ended
        assert not await second.is_cancelled()
        await first.close()

    asyncio.run(main())
    assert len(result) == 1
    assert "The run has ended: succeeded" in result[0]


@pytest.mark.parametrize(
    "url", ["http://board", "http://10.0.0.1", "https://", "board", "https://a:b@c", "https://x:99999", "https://x?y=1"]
)
def test_rejects_an_invalid_or_unencrypted_address(url: str) -> None:
    with pytest.raises(BadUrlError):
        BoardClient(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8000", "https://board/under/"])
def test_allows_plain_http_to_loopback(url: str) -> None:
    BoardClient(url)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"field": "run", "in": "path", "message": "this token is of another run"}, "this token is of another run"),
        ({"field": "request", "message": "Redis does not answer"}, "Redis does not answer"),
        ({"field": "node", "in": "body", "message": "is taken"}, "node: is taken"),
    ],
)
def test_error_names_only_fields_of_the_request(error: dict[str, str], words: str) -> None:
    assert BoardAnswer(404, {"errors": [error]}, None).problem == words
