"""A job that attacks its host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contracts.codec import MAX_BATCH_BYTES, decode_event
from contracts.names import events_stream, telemetry_stream
from tests.support.host import run_host
from tests.support.processes import RedisServer, wait_until
from workers.host.supervisor.publisher import LOG_BURST, LOG_BYTES_PER_S

ONE_RANK: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "train": {"steps": 1, "warmup_steps": 0}}
LOG_BYTES = 4 * 2**20
AT_MOST_S = 60


def test_job_that_breaks_its_files_harms_only_itself(redis_service: RedisServer, tmp_path: Path) -> None:
    settings = {"MESHBOARD_LOG_BYTES": str(LOG_BYTES)}
    with (
        run_host(redis_service, tmp_path, "tests.workers.destructive_script", **settings) as machine,
        machine.run_worker(),
    ):
        (machine.data_root / "secret.log").write_text("the secret of another\n")
        attempt = machine.send_launch_order("hostile", spec=ONE_RANK)
        told_file = attempt.work / "told.json"
        wait_until(lambda: told_file.exists(), "it has said its nonsense")
        result = json.loads(told_file.read_text())
        assert {what for what, cut_off in result.items() if cut_off} == {"a log in another's name", "a gap", "no frame"}

        def lines() -> list[str]:
            return [line for item in machine.read_items("hostile", "log") for line in item["lines"]]

        wait_until(lambda: "the end" in lines(), "the end of its log is sent", AT_MOST_S)
        assert not [line for line in lines() if "secret" in line or "forged" in line]
        skipped = sum(item.get("skipped", 0) for item in machine.read_items("hostile", "log"))
        assert skipped > 0
        (log,) = attempt.logs.glob("*/attempt_0/0/stdout.log")
        assert log.stat().st_blocks * 512 <= LOG_BYTES + 2**16
        assert log.stat().st_size > 5 * LOG_BYTES

        entries: Any = redis_service.client().xrange(telemetry_stream("hostile", 1))
        sizes = [len(fields[b"b"]) for _, fields in entries]
        assert max(sizes) <= MAX_BATCH_BYTES
        assert sum(sizes) < LOG_BURST + AT_MOST_S * LOG_BYTES_PER_S + 2**20
        assert sum(item["items"] for item in machine.read_items("hostile", "gap")) == len(result) - 1

        assert len(machine.read_items("hostile", "phase")) == 5, "the valid items of each valid frame"

        received = len(machine.read_events("host"))
        wait_until(lambda: len(machine.read_events("host")) > received, "the host still sends heartbeats", 10)
        (attempt.work / "go").touch()
        report = machine.wait_for_exit("hostile")
        assert (report["outcome"], report["reason"]) == ("succeeded", "finished; this attempt reported no steps")
        everything: Any = redis_service.client().xrange(events_stream("testhost"))
        assert all(decode_event(fields[b"b"]) for _, fields in everything)
        assert machine.list_processes("hostile") == []
