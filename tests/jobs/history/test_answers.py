"""Serve histories over REST and pages, as JSON and as files."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from contracts.names import telemetry_stream
from jobs.models import Attempt
from jobs.queue import actions
from jobs.runs.history.queries import tables
from jobs.runs.history.recording.recorder import HistoryRecorder
from jobs.runs.history.store import folder, retention
from tests.jobs.history.conftest import end
from tests.jobs.history.sample_telemetry import BEGAN, Sender, batch, cell, generate_run, record_batches, step
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture
def recorded_job(attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder) -> str:
    """Return the job of an ended run of two ranks and 40 steps in 20 s."""
    sender = Sender(live_redis, attempt.job_id)
    for some in generate_run(2, 40):
        sender.send(some)
    sender.send(batch(20, {"kind": "eval", "rank": 0, "time": BEGAN + 20, "step": 40, "loss": 4.5}))
    end(attempt)
    recorder.run_once()
    return attempt.job_id


def test_lists_stored_attempts(recorded_job: str, owner: User, api: Api) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{recorded_job}/history").json()
    [stored] = answer["attempts"]
    assert (stored["attempt"], stored["ended"]) == (1, True)
    assert stored["tables"]["steps"]["rows"] == 80
    assert stored["bytes"] == sum(table["bytes"] for table in stored["tables"].values())
    assert (stored["from"], stored["to"]) == (BEGAN + 0.5, BEGAN + 20)


def test_returns_requested_rows(recorded_job: str, owner: User, api: Api) -> None:
    client = api(owner)
    for query, rows in (
        ("", 80),
        ("ranks=1", 40),
        ("ranks=0-1", 80),
        ("ranks=2-9,11", 0),
        ("steps=3,5-6", 6),
        (f"from={BEGAN + 1}&to={BEGAN + 2}", 6),
        (f"from={BEGAN + 1}&to={BEGAN + 2}&ranks=0", 3),
    ):
        columns = client.get(f"/api/v1/jobs/{recorded_job}/history/steps?{query}").json()["columns"]
        assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, rows), query
        assert "exposed" in columns


def test_bins_add_up_to_the_rows(recorded_job: str, owner: User, api: Api) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/traffic?bins=5&ranks=0&by=op,phase").json()
    assert answer["width_s"] == pytest.approx((20 - 0.5) / 5)
    columns = answer["columns"]
    bins = sorted(set(columns["time"]))
    assert bins == pytest.approx([BEGAN + 0.5 + answer["width_s"] * n for n in range(5)])
    rows = zip(columns["op"], columns["phase"], columns["payload_bytes"], strict=True)
    assert sum(payload for op, phase, payload in rows if (op, phase) == ("all_reduce", "step")) == 400_000
    steps = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/steps?bins=2").json()["columns"]
    assert steps["steps"] == [20, 20]
    assert steps["loss_max"][0] == 4.99
    assert steps["loss_min"][1] == pytest.approx(4.6)


def test_bins_of_a_merged_history_cover_all_steps(recorded_job: str, owner: User, api: Api, root: Path) -> None:
    """A row of 8 s filled one of 8 bins, so a steady run seemed to stall for seven seconds."""
    stored = folder.HistoryFolder(root, recorded_job, 1)
    manifest = stored.read_manifest()
    for _ in range(3):
        assert retention._merge(stored, manifest)
    client = api(owner)
    steps = client.get(f"/api/v1/jobs/{recorded_job}/history/steps?bins=1").json()["columns"]
    assert (steps["steps"], steps["first_step"], steps["last_step"]) == ([40], [1], [40])
    assert steps["loss_mean"][0] == pytest.approx(4.795)
    answer = client.get(f"/api/v1/jobs/{recorded_job}/history/traffic?bins=2000&ranks=0&by=axis").json()
    assert answer["width_s"] == 8
    bins = sorted(set(answer["columns"]["time"]))
    assert bins == [bins[0] + 8 * n for n in range(len(bins))], "none of them is empty"
    newest = answer["to"] - (answer["to"] - answer["from"]) / 8
    assert client.get(f"/api/v1/jobs/{recorded_job}/history/traffic?bins=2000&from={newest}").json()["width_s"] < 0.01


def test_file_has_every_row_and_a_unique_name(recorded_job: str, owner: User, api: Api, root: Path) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/steps?format=parquet&ranks=0")
    assert answer["Content-Disposition"] == f'attachment; filename="{recorded_job}-1-steps.parquet"'
    table = pq.read_table(io.BytesIO(b"".join(answer.streaming_content)))  # type: ignore[attr-defined]
    assert table.column("step").to_pylist() == list(range(1, 41))
    answer = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/traffic?format=csv&bins=4")
    lines = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))  # type: ignore[attr-defined]
    assert sum(int(line["payload_bytes"]) for line in lines if line["op"] == "all_gather") == 2 * 40_000
    assert list((root / "spill").iterdir()) == [], "temporary files are deleted"


def test_rejects_too_many_rows_for_json(
    recorded_job: str, owner: User, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_JSON_ROWS", 79)
    answer = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/steps")
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "format"
    assert error["message"].startswith("The answer has 80 rows, but the maximum for JSON is 79.")
    assert api(owner).get(f"/api/v1/jobs/{recorded_job}/history/steps?ranks=0").status_code == 200


WRONG = [
    ("nothing", "table"),
    ("steps?ranks=x", "ranks"),
    ("steps?ranks=3-1", "ranks"),
    ("steps?ranks=", "ranks"),
    ("steps?ranks=²", "ranks"),
    ("steps?from=nan", "from"),
    ("steps?from=-1", "from"),
    ("steps?from=1e99", "from"),
    ("steps?from=5&to=4", "from"),
    ("steps?bins=0", "bins"),
    ("steps?bins=2001", "bins"),
    ("marks?bins=5", "bins"),
    ("traffic?steps=5", "steps"),
    ("steps?by=op", "by"),
    ("traffic?by=rank,rank", "by"),
    ("steps?format=xml", "format"),
    ("steps?attempt=0", "attempt"),
    ("steps?ranks=1&ranks=2", "ranks"),
    ("steps?rank=1", "rank"),
    ("snapshot?bins=3", "bins"),
    ("steps?steps=1;drop table steps", "steps"),
]


# No document can say of these that they make no sense: it does of the table, or of two together.
STATUS = {"nothing": 404} | dict.fromkeys(
    ("steps?from=5&to=4", "marks?bins=5", "traffic?steps=5", "steps?by=op", "traffic?by=rank,rank"), 422
)


def test_rejects_invalid_parameter_by_name(attempt: Attempt, root: Path, owner: User, api: Api) -> None:
    client = api(owner)
    for path, field in WRONG:
        answer = client.get(f"/api/v1/jobs/{attempt.job_id}/history/{path}")
        assert answer.status_code == STATUS.get(path, 400), path
        where = "path" if field == "table" else "query"
        assert (field, where) in [(error["field"], error["in"]) for error in answer.json()["errors"]], path


def test_history_is_visible_with_its_job(recorded_job: str, owner: User, stranger: User, staff: User, api: Api) -> None:
    for path in ("", "/steps", "/snapshot"):
        of_job = f"/api/v1/jobs/{recorded_job}/history{path}"
        assert api(stranger).get(of_job).status_code == 404
        assert api(None).get(of_job).status_code == 401
        assert api(staff).get(of_job).status_code == 200
        page = Client()
        assert page.get(f"/jobs/{recorded_job}/history{path}/").status_code == 302
        page.force_login(stranger, backend="django.contrib.auth.backends.ModelBackend")
        assert page.get(f"/jobs/{recorded_job}/history{path}/").status_code == 404
        page.force_login(owner, backend="django.contrib.auth.backends.ModelBackend")
        assert page.get(f"/jobs/{recorded_job}/history{path}/").json() == api(owner).get(of_job).json()


def test_missing_history_is_404(attempt: Attempt, root: Path, owner: User, api: Api) -> None:
    client = api(owner)
    assert client.get(f"/api/v1/jobs/{attempt.job_id}/history").json()["attempts"] == []
    for path in ("steps", "snapshot", "steps?format=csv", "steps?attempt=7"):
        answer = client.get(f"/api/v1/jobs/{attempt.job_id}/history/{path}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (404, "attempt")


def test_reader_survives_replaced_files(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    owner: User,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Merge files during queries. Each response is of one moment, and never an error."""
    monkeypatch.setattr(folder, "FILES_PER_LEVEL", 2)
    sender, client = Sender(live_redis, attempt.job_id), api(owner)
    for number, some in enumerate(generate_run(1, 12), 1):
        sender.send(some)
        recorder.run_once()
        steps = client.get(f"/api/v1/jobs/{attempt.job_id}/history/steps").json()["columns"]["step"]
        assert steps == list(range(1, number + 1))


def test_snapshot_has_totals_and_stream_positions(recorded_job: str, owner: User, api: Api, live_redis: Any) -> None:
    answer: Any = api(owner).get(f"/api/v1/jobs/{recorded_job}/history/snapshot").json()
    assert answer["ended"]
    assert answer["progress"]["step"] == 40
    assert answer["curve"]["step"] == list(range(1, 41))
    assert answer["curve"]["loss"][0] == 4.99
    assert [rank["ran"] for rank in answer["ranks"]] == [40, 40]
    assert sum(sum(row["bytes"]) for row in answer["traffic"]["rows"]) == sum(answer["cells"]["payload_bytes"])
    assert answer["traffic"]["width_s"] == 1.0
    assert sum(answer["exact"]["payload_bytes"]) == 2 * (400_000 + 40_000)
    assert (
        answer["followed"][0]["after"]
        == live_redis.xrevrange(telemetry_stream(recorded_job, 1), count=1)[0][0].decode()
    )
    assert answer["marks"]["kind"] == ["validation", "end"]
    assert answer["parts"]["exposed"] == [{"dp": 0.1}, {"dp": 0.1}]


def test_long_curve_is_thinned(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, owner: User, api: Api
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in range(10):
        items = [step(0, number, number / 20, cell(number)) for number in range(some * 900 + 1, some * 900 + 901)]
        sender.send(batch(some * 45 + 45, *items))
    recorder.run_once()
    answer: Any = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/history/snapshot").json()
    assert answer["stride"] == 4
    assert answer["curve"]["step"] == list(range(4, 9001, 4))
    assert len(answer["traffic"]["rows"][0]["bytes"]) == answer["traffic"]["length"] <= 600
    assert sum(answer["traffic"]["rows"][0]["bytes"]) == 9_000_000


def read_back(cell: str) -> str:
    """Decode a CSV cell as docs/explanation/history.md describes."""
    return str(json.loads(f'"{cell.removeprefix(chr(39)).replace(chr(34), chr(92) + chr(34))}"'))


def test_rate_is_tokens_over_time_of_rank_0(owner: User, api: Api, root: Path) -> None:
    """A mean of rates would weigh fast steps more. Another rank may report a step first."""
    seconds = [0.1, 1.0, 0.2]
    made, _ = actions.submit(owner, GOOD)
    recorded_job = [(rank, n, took * (1 + rank)) for n, took in enumerate(seconds) for rank in (1, 0)]
    record_batches(
        root, [batch(at, step(rank, n + 1, n, step_s=took)) for at, (rank, n, took) in enumerate(recorded_job)], made.id
    )
    progress = api(owner).get(f"/api/v1/jobs/{made.id}/history/snapshot").json()["progress"]
    assert progress["rate"] == pytest.approx(3 * 4096 / sum(seconds))


def test_number_is_equal_in_json_csv_and_parquet(owner: User, api: Api, root: Path) -> None:
    """32-bit floats have up to nine digits."""
    seconds = [0.17878523468971252, 0.1, 1 / 3, 16777217.0, 3.4028234e38, 0.0]
    made, _ = actions.submit(owner, GOOD)
    record_batches(
        root, [batch(n, step(0, n + 1, n, step_s=recorded_job)) for n, recorded_job in enumerate(seconds)], made.id
    )

    def request_rows(form: str) -> bytes:
        answer = api(owner).get(f"/api/v1/jobs/{made.id}/history/steps?format={form}")
        return b"".join(answer.streaming_content) if form != "json" else answer.content  # type: ignore[attr-defined]

    recorded_job = json.loads(request_rows("json"))["columns"]["step_s"]
    assert recorded_job == [float(row["step_s"]) for row in csv.DictReader(io.StringIO(request_rows("csv").decode()))]
    stored = pq.read_table(io.BytesIO(request_rows("parquet")))["step_s"].to_pylist()
    assert [struct.pack("f", number) for number in recorded_job] == [struct.pack("f", number) for number in stored]


def test_csv_round_trips_and_escapes_formulas(owner: User, api: Api, root: Path) -> None:
    lines = ["\x1b[31mred\x1b[0m", '=1+1, "quoted"', "a\tb\x7f\x85", "back\\slash \\u0041", "", "'"]
    texts = ["=HYPERLINK(1)", "+1", "'twice", '\x1b]0;title\x07 "and" \\n', "plain, with a comma", "\t=1"]
    items: list[Any] = [{"kind": "log", "rank": 0, "time": BEGAN, "first": 0, "lines": lines}]
    items += [
        {"kind": "checkpoint", "rank": 0, "time": BEGAN + n, "step": n, "name": None, "num_bytes": 0, "stall_s": 0.1}
        | {"save_s": 0.1, "problem": text}
        for n, text in enumerate(texts, 1)
    ]
    made = Attempt.objects.create(job=actions.submit(owner, GOOD)[0], number=1)
    record_batches(root, [batch(1, step(0, 1, 0.5), *items)], made.job_id)

    def read(table: str) -> tuple[str, list[dict[str, str]]]:
        answer = api(owner).get(f"/api/v1/jobs/{made.job_id}/history/{table}?format=csv")
        text = b"".join(answer.streaming_content).decode()  # type: ignore[attr-defined]
        return text, list(csv.DictReader(io.StringIO(text)))

    text, rows = read("logs")
    assert [json.loads(row["lines"]) for row in rows] == [lines]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    text, rows = read("marks")
    faults = [row["text"] for row in rows if row["kind"] == "fault"]
    assert [read_back(cell) for cell in faults] == texts
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in faults)
    _, rows = read("steps")
    assert json.loads(rows[0]["exposed"]) == {"dp": 0.1}
