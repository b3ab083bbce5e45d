"""The audit from a shell and from Python: page after page, and as one CSV file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meshboard import Client
from tests.client.conftest import FakeServer, Ran, answer

Meshboard = Callable[..., Ran]
ENTRY = {
    "at": "2026-11-26T00:00:00+00:00", "who": "ann", "address": "", "what": "hold", "kind": "job", "name": "j",
    "before": None, "after": {"held": True},
}  # fmt: skip
NEXT = '<http://board/api/v1/audit?limit=2&cursor=abc>; rel="next"'


def entries(*ids: int) -> list[dict[str, Any]]:
    return [{"id": number, **ENTRY} for number in ids]


def test_prints_the_newest_audit_entries_over_several_pages(meshboard: Meshboard, server: FakeServer) -> None:
    server.answers = [answer(200, entries(9, 8), Link=NEXT), answer(200, entries(7, 6))]
    ran = meshboard("audit", "--limit", "3", "--after", "2", "--json", at=server)
    assert (ran.code, [row["id"] for row in json.loads(ran.out)]) == (0, [9, 8, 7])
    assert server.requests == ["GET /api/v1/audit?after=2&limit=3", "GET /api/v1/audit?limit=2&cursor=abc"]
    server.answers = [answer(200, entries(9))]
    shown = meshboard("audit", at=server).out.splitlines()
    assert (shown[0].split()[0], shown[1].split()[0], shown[1].endswith('-       {"held": true}')) == ("id", "9", True)


def test_prints_the_complete_audit_log_as_one_csv(meshboard: Meshboard, server: FakeServer) -> None:
    pages = [b'id,who\r\n9,"a\r\nb"\r\n', b"id,who\r\n8,c\r\n"]
    server.answers = [answer(200, pages[0], Link=NEXT), answer(200, pages[1])]
    ran = meshboard("audit", "--csv", "--after", "2", at=server)
    assert (ran.code, ran.out) == (0, 'id,who\r\n9,"a\r\nb"\r\n8,c\r\n')
    assert server.requests[0] == "GET /api/v1/audit?limit=1000&after=2&format=csv"
    server.respond((200, b"id,who\r\n"))
    with Client(server.url, "t") as board:
        assert list(board.audit_csv(before=7)) == ["id,who\r\n"]


def test_rejects_csv_with_json_or_limit(meshboard: Meshboard, server: FakeServer) -> None:
    for option in (["--json"], ["--limit", "3"]):
        ran = meshboard("audit", "--csv", *option, at=server)
        assert (ran.code, f"Omit {option[0]}." in ran.err, server.requests) == (2, True, [])
