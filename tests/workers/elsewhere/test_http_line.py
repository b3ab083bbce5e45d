"""The line over HTTPS against a real board: nothing twice, nothing lost, nothing to whom it does not trust."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from contracts.codec import decode_batch, encode_batch
from contracts.control import AttemptReport
from contracts.names import telemetry_stream
from contracts.telemetry.batches import Batch
from contracts.telemetry.steps import PhaseItem
from tests.support.patience import patient
from tests.support.tls import TlsBoard
from tests.workers.elsewhere.relay import relay
from workers.elsewhere.joining import Asked, Joining, Run
from workers.host.supervisor.board import Board as Waiting
from workers.host.supervisor.line import LineError
from workers.host.supervisor.line import RefusedError as LineRefusedError
from workers.host.supervisor.line.https import Answer, AwayError, BadUrlError, Board
from workers.host.supervisor.line.over_http import HttpLine, Membership
from workers.host.supervisor.publish import Publisher

PHASE = PhaseItem(kind="phase", rank=0, time=1.0, phase="step")


async def joined(at: TlsBoard, board: Board, told: list[str]) -> tuple[Run, Membership]:
    asked = Asked(None, at.people["owner"]["token"], {"name": "a line", "world_size": 1})
    joining = Joining(board, asked, told.append)
    run = await joining.open()
    return run, await joining.join(run, 0, "here")


def batch(run: str, **changes: Any) -> bytes:
    whole = Batch(v=1, job=run, attempt=1, time=1.0, items=[PHASE])
    return encode_batch({**whole, **changes})  # type: ignore[typeddict-item]


def items(at: TlsBoard, run: str) -> list[Any]:
    entries: Any = at.redis.client().xrange(telemetry_stream(run, 1))
    return [item for _, fields in entries for item in decode_batch(fields[b"b"])["items"]]


def numbers(at: TlsBoard, run: str) -> list[int]:
    entries: Any = at.redis.client().xrange(telemetry_stream(run, 1))
    return [int(fields[b"n"]) for _, fields in entries]


async def until_taken(work: Callable[[], Awaitable[None]]) -> None:
    """Again and again, as a supervisor does."""
    async with asyncio.timeout(patient(30)):
        while True:
            try:
                return await work()
            except LineError:
                await asyncio.sleep(0.05)


def test_a_batch_whose_answer_was_lost_is_said_again_and_taken_once(serving: TlsBoard) -> None:
    told: list[str] = []

    async def main(port: int, deaf: Callable[[], None], hears: Callable[[], None]) -> str:
        board = Board(f"https://127.0.0.1:{port}", serving.ca)
        run, who = await joined(serving, board, told)
        line = HttpLine(board, who, told.append)
        await line.publish(batch(run.id))
        deaf()
        for _ in range(2):
            with pytest.raises(LineError):
                await line.publish(batch(run.id))
        hears()
        await until_taken(lambda: line.publish(batch(run.id)))
        await until_taken(lambda: line.publish(batch(run.id)))
        await line.renew()
        await line.close()
        return run.id

    with relay(serving.port) as way:
        run = asyncio.run(main(way.port, way.deaf.set, way.deaf.clear))
        assert way.lost >= 1, "the board took what it was asked"
    assert numbers(serving, run) == [0, 1, 2]
    assert [words.split(" (")[0] for words in told] == ["The board does not answer", "The board answers again."]


class Refusing(Board):
    """Takes batches after `troubles`: no answer, or this one."""

    def __init__(self, at: TlsBoard, troubles: list[Answer | None]) -> None:
        super().__init__(at.url, at.ca)
        self._troubles = troubles

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        if "batches" not in path or not self._troubles:
            return super().post(path, body, headers)
        trouble = self._troubles.pop(0)
        if trouble is None:
            raise AwayError("connection refused")
        return trouble


def test_a_batch_that_waits_for_a_board_that_is_away_and_then_busy_is_not_lost(serving: TlsBoard) -> None:
    """One that was held was let go without a word when the board came back with "not now"."""

    async def main() -> str:
        board = Refusing(serving, [None, Answer(503, {}, 0.0)])
        run, who = await joined(serving, board, [])
        waiting = Waiting()
        publisher = Publisher(run.id, 1, waiting, HttpLine(board, who, print))
        async with asyncio.timeout(patient(30)):
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


def test_one_connection_is_kept(serving: TlsBoard) -> None:
    async def main(port: int) -> None:
        board = Board(f"https://127.0.0.1:{port}", serving.ca)
        run, who = await joined(serving, board, [])
        line = HttpLine(board, who)
        for _ in range(20):
            await line.publish(batch(run.id))
        await line.close()

    with relay(serving.port) as way:
        asyncio.run(main(way.port))
        assert way.opened == 1


def test_the_environments_proxy_is_used_and_sees_no_token(serving: TlsBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay(serving.port) as way:
        monkeypatch.setenv("https_proxy", f"http://me:pass@127.0.0.1:{way.port}")
        monkeypatch.setenv("no_proxy", "")
        asyncio.run(joined(serving, Board(serving.url, serving.ca), []))
        assert way.asked[0].startswith(f"CONNECT 127.0.0.1:{serving.port}".encode())
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        before = way.opened
        asyncio.run(joined(serving, Board(serving.url, serving.ca), []))
        assert way.opened == before


def test_what_the_board_will_never_take_is_let_go_and_shown_as_a_gap(serving: TlsBoard) -> None:
    async def main() -> str:
        board = Board(serving.url, serving.ca)
        run, who = await joined(serving, board, [])
        line, waiting = HttpLine(board, who), Waiting()
        waiting.add({**PHASE, "rank": 7})
        publisher = Publisher(run.id, 1, waiting, line)
        assert not await publisher.send()
        assert not line.over
        waiting.add(PHASE)
        assert await publisher.send(), "what comes behind it is taken"
        await line.close()
        return run.id

    kinds = [item["kind"] for item in items(serving, asyncio.run(main()))]
    assert kinds == ["gap", "phase"]


def test_a_run_that_ended_takes_no_more_and_a_line_says_nothing_further(serving: TlsBoard) -> None:
    told: list[str] = []

    async def main() -> None:
        board = Board(serving.url, serving.ca)
        run, who = await joined(serving, board, told)
        first, second = HttpLine(board, who), HttpLine(board, who, told.append)
        running = AttemptReport(job=run.id, attempt=1, state="running", slots=[])
        await second.report(running)
        assert not await second.cancelled()
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
        await first.report({**running, "state": "exited", "exit": ended})
        await first.report({**running, "state": "exited", "exit": ended})
        for _ in range(3):
            with pytest.raises(LineRefusedError):
                await second.report(running)
        assert second.over
        assert not await second.cancelled()
        await first.close()

    asyncio.run(main())
    assert len(told) == 1
    assert "The run has ended: succeeded" in told[0]


@pytest.mark.parametrize(
    "url", ["http://board", "http://10.0.0.1", "https://", "board", "https://a:b@c", "https://x:99999", "https://x?y=1"]
)
def test_an_address_that_would_show_a_token_or_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadUrlError):
        Board(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8000", "https://board/under/"])
def test_loopback_may_be_spoken_to_plainly(url: str) -> None:
    Board(url)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"field": "run", "in": "path", "message": "this token is of another run"}, "this token is of another run"),
        ({"field": "request", "message": "Redis does not answer"}, "Redis does not answer"),
        ({"field": "node", "in": "body", "message": "is taken"}, "node: is taken"),
    ],
)
def test_a_refusal_names_no_part_of_an_address_that_nobody_wrote(error: dict[str, str], words: str) -> None:
    assert Answer(404, {"errors": [error]}, None).problem == words
