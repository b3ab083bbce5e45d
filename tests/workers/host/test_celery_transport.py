"""Invalid messages in a host's queue."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from contracts.names import host_queue
from tests.support.host import HOST_NAME, run_host
from tests.support.processes import RedisServer, wait_until

INFO: dict[str, Any] = {"exchange": "", "routing_key": host_queue(HOST_NAME)}
PROPERTIES: dict[str, Any] = {"delivery_tag": "tag", "delivery_info": INFO, "body_encoding": "base64"}
BODY = base64.b64encode(b"[[], {}, {}]").decode()
MESSAGE: dict[str, Any] = {"body": BODY, "content-type": "application/json", "content-encoding": "utf-8"}
UNREADABLE: list[bytes] = [
    b"garbage",
    b"\xff\xfe\0",
    b"[" * 100_000,
    *(
        json.dumps(result).encode()
        for result in (
            None,
            7,
            [],
            {},
            {"properties": None},
            {**MESSAGE, "properties": {}},
            {**MESSAGE, "properties": {**PROPERTIES, "delivery_info": {}}},
            {**MESSAGE, "properties": {**PROPERTIES, "delivery_tag": {}}},
            {**MESSAGE, "properties": {**PROPERTIES, "delivery_tag": True}},
            {**MESSAGE, "properties": {**PROPERTIES, "body_encoding": "rot13"}},
            {**MESSAGE, "properties": PROPERTIES, "body": "?"},
        )
    ),
]
UNTAKEABLE = [
    json.dumps({**MESSAGE, "properties": PROPERTIES, "headers": headers}).encode()
    for headers in ([1], {"task": []}, {"task": "nobody's"}, {"task": "celery.ping", "compression": 7})
]


def test_drops_invalid_messages_and_continues(redis_service: RedisServer, tmp_path: Path) -> None:
    """Check messages that end a plain Celery worker."""
    client, queue, log = redis_service.client(), host_queue(HOST_NAME), tmp_path / "worker.log"
    with (
        run_host(redis_service, tmp_path, "tests.workers.term_ignoring_script") as machine,
        machine.run_worker() as process,
    ):
        client.publish("/0.celery.pidbox", b"7")
        client.lpush(queue, *UNREADABLE, *UNTAKEABLE)
        attempt = machine.send_launch_order("afterwards", spec={"model": {"preset": "gpt-tiny"}})
        wait_until(lambda: process.poll() is not None or attempt.get_supervisor(), "the order is carried out")
        assert process.poll() is None
        wait_until(lambda: client.hlen("unacked") == 0, "no message is left for redelivery")
        assert client.llen(queue) == 0
        assert "Connection to broker lost" not in log.read_text()
    assert log.read_text().count("dropped an ") >= len(UNREADABLE)
