"""What is told of histories: through REST and pages, as JSON and as files, to those who may see the job."""

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
from tests.jobs.history.told import BEGAN, Sender, batch, cell, keep, run, step
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture
def told(attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder) -> str:
    """The job of a run of two ranks and 40 steps in 20 s that has ended."""
    sender = Sender(live_redis, attempt.job_id)
    for some in run(2, 40):
        sender.send(some)
    sender.send(batch(20, {"kind": "eval", "rank": 0, "time": BEGAN + 20, "step": 40, "loss": 4.5}))
    end(attempt)
    recorder.run_once()
    return attempt.job_id


def test_what_is_kept_is_listed(told: str, owner: User, api: Api) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{told}/history").json()
    [kept] = answer["attempts"]
    assert (kept["attempt"], kept["ended"]) == (1, True)
    assert kept["tables"]["steps"]["rows"] == 80
    assert kept["bytes"] == sum(table["bytes"] for table in kept["tables"].values())
    assert (kept["from"], kept["to"]) == (BEGAN + 0.5, BEGAN + 20)


def test_rows_are_those_asked_for(told: str, owner: User, api: Api) -> None:
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
        columns = client.get(f"/api/v1/jobs/{told}/history/steps?{query}").json()["columns"]
        assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, rows), query
        assert "exposed" in columns


def test_bins_add_up(told: str, owner: User, api: Api) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{told}/history/traffic?bins=5&ranks=0&by=op,phase").json()
    assert answer["width_s"] == pytest.approx((20 - 0.5) / 5)
    columns = answer["columns"]
    bins = sorted(set(columns["time"]))
    assert bins == pytest.approx([BEGAN + 0.5 + answer["width_s"] * n for n in range(5)])
    rows = zip(columns["op"], columns["phase"], columns["payload_bytes"], strict=True)
    assert sum(payload for op, phase, payload in rows if (op, phase) == ("all_reduce", "step")) == 400_000
    steps = api(owner).get(f"/api/v1/jobs/{told}/history/steps?bins=2").json()["columns"]
    assert steps["steps"] == [20, 20]
    assert steps["loss_max"][0] == 4.99
    assert steps["loss_min"][1] == pytest.approx(4.6)


def test_bins_of_a_merged_history_stand_for_all_of_its_steps_and_are_no_narrower(
    told: str, owner: User, api: Api, root: Path
) -> None:
    """A row for 8 s lay in one of 8 bins, and seven seconds of a steady run were told as a standstill."""
    kept = folder.HistoryFolder(root, told, 1)
    manifest = kept.read_manifest()
    for _ in range(3):
        assert retention._merge(kept, manifest)
    client = api(owner)
    steps = client.get(f"/api/v1/jobs/{told}/history/steps?bins=1").json()["columns"]
    assert (steps["steps"], steps["first_step"], steps["last_step"]) == ([40], [1], [40])
    assert steps["loss_mean"][0] == pytest.approx(4.795)
    answer = client.get(f"/api/v1/jobs/{told}/history/traffic?bins=2000&ranks=0&by=axis").json()
    assert answer["width_s"] == 8
    bins = sorted(set(answer["columns"]["time"]))
    assert bins == [bins[0] + 8 * n for n in range(len(bins))], "none of them is empty"
    newest = answer["to"] - (answer["to"] - answer["from"]) / 8
    assert client.get(f"/api/v1/jobs/{told}/history/traffic?bins=2000&from={newest}").json()["width_s"] < 0.01


def test_files_hold_every_row_under_a_name_of_their_own(told: str, owner: User, api: Api, root: Path) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{told}/history/steps?format=parquet&ranks=0")
    assert answer["Content-Disposition"] == f'attachment; filename="{told}-1-steps.parquet"'
    table = pq.read_table(io.BytesIO(b"".join(answer.streaming_content)))  # type: ignore[attr-defined]
    assert table.column("step").to_pylist() == list(range(1, 41))
    answer = api(owner).get(f"/api/v1/jobs/{told}/history/traffic?format=csv&bins=4")
    lines = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))  # type: ignore[attr-defined]
    assert sum(int(line["payload_bytes"]) for line in lines if line["op"] == "all_gather") == 2 * 40_000
    assert list((root / "spill").iterdir()) == [], "nothing is left of them"


def test_too_many_rows_for_json_are_refused_with_how_many(
    told: str, owner: User, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_JSON_ROWS", 79)
    answer = api(owner).get(f"/api/v1/jobs/{told}/history/steps")
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "format"
    assert error["message"].startswith("The answer has 80 rows, but the maximum for JSON is 79.")
    assert api(owner).get(f"/api/v1/jobs/{told}/history/steps?ranks=0").status_code == 200


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


def test_a_senseless_parameter_is_named(attempt: Attempt, root: Path, owner: User, api: Api) -> None:
    client = api(owner)
    for path, field in WRONG:
        answer = client.get(f"/api/v1/jobs/{attempt.job_id}/history/{path}")
        assert answer.status_code == STATUS.get(path, 400), path
        where = "path" if field == "table" else "query"
        assert (field, where) in [(error["field"], error["in"]) for error in answer.json()["errors"]], path


def test_a_history_is_its_job_s(told: str, owner: User, stranger: User, staff: User, api: Api) -> None:
    for path in ("", "/steps", "/snapshot"):
        of_job = f"/api/v1/jobs/{told}/history{path}"
        assert api(stranger).get(of_job).status_code == 404
        assert api(None).get(of_job).status_code == 401
        assert api(staff).get(of_job).status_code == 200
        page = Client()
        assert page.get(f"/jobs/{told}/history{path}/").status_code == 302
        page.force_login(stranger, backend="django.contrib.auth.backends.ModelBackend")
        assert page.get(f"/jobs/{told}/history{path}/").status_code == 404
        page.force_login(owner, backend="django.contrib.auth.backends.ModelBackend")
        assert page.get(f"/jobs/{told}/history{path}/").json() == api(owner).get(of_job).json()


def test_what_was_never_recorded_is_not_there(attempt: Attempt, root: Path, owner: User, api: Api) -> None:
    client = api(owner)
    assert client.get(f"/api/v1/jobs/{attempt.job_id}/history").json()["attempts"] == []
    for path in ("steps", "snapshot", "steps?format=csv", "steps?attempt=7"):
        answer = client.get(f"/api/v1/jobs/{attempt.job_id}/history/{path}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (404, "attempt")


def test_a_reader_outlives_what_the_recorder_replaces(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    owner: User,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are joined while questions are asked: an answer is of one moment, never an error."""
    monkeypatch.setattr(folder, "FILES_PER_LEVEL", 2)
    sender, client = Sender(live_redis, attempt.job_id), api(owner)
    for number, some in enumerate(run(1, 12), 1):
        sender.send(some)
        recorder.run_once()
        steps = client.get(f"/api/v1/jobs/{attempt.job_id}/history/steps").json()["columns"]["step"]
        assert steps == list(range(1, number + 1))


def test_a_snapshot_holds_the_totals_and_where_to_go_on(told: str, owner: User, api: Api, live_redis: Any) -> None:
    answer: Any = api(owner).get(f"/api/v1/jobs/{told}/history/snapshot").json()
    assert answer["ended"]
    assert answer["progress"]["step"] == 40
    assert answer["curve"]["step"] == list(range(1, 41))
    assert answer["curve"]["loss"][0] == 4.99
    assert [rank["ran"] for rank in answer["ranks"]] == [40, 40]
    assert sum(sum(row["bytes"]) for row in answer["traffic"]["rows"]) == sum(answer["cells"]["payload_bytes"])
    assert answer["traffic"]["width_s"] == 1.0
    assert sum(answer["exact"]["payload_bytes"]) == 2 * (400_000 + 40_000)
    assert answer["followed"][0]["after"] == live_redis.xrevrange(telemetry_stream(told, 1), count=1)[0][0].decode()
    assert answer["marks"]["kind"] == ["validation", "end"]
    assert answer["parts"]["exposed"] == [{"dp": 0.1}, {"dp": 0.1}]


def test_a_long_curve_is_thinned_to_what_a_screen_holds(
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
    """As docs/explanation/history.md says it."""
    return str(json.loads(f'"{cell.removeprefix(chr(39)).replace(chr(34), chr(92) + chr(34))}"'))


def test_the_speed_is_tokens_over_time_of_rank_0(owner: User, api: Api, root: Path) -> None:
    """Not a mean of speeds, which weighs the quick steps more; another rank may tell of a step first."""
    seconds = [0.1, 1.0, 0.2]
    made, _ = actions.submit(owner, GOOD)
    told = [(rank, n, took * (1 + rank)) for n, took in enumerate(seconds) for rank in (1, 0)]
    keep(root, [batch(at, step(rank, n + 1, n, step_s=took)) for at, (rank, n, took) in enumerate(told)], made.id)
    progress = api(owner).get(f"/api/v1/jobs/{made.id}/history/snapshot").json()["progress"]
    assert progress["rate"] == pytest.approx(3 * 4096 / sum(seconds))


def test_a_number_is_the_same_in_json_csv_and_parquet(owner: User, api: Api, root: Path) -> None:
    """Those of 32 bits too, which have up to nine digits."""
    seconds = [0.17878523468971252, 0.1, 1 / 3, 16777217.0, 3.4028234e38, 0.0]
    made, _ = actions.submit(owner, GOOD)
    keep(root, [batch(n, step(0, n + 1, n, step_s=told)) for n, told in enumerate(seconds)], made.id)

    def asked(form: str) -> bytes:
        answer = api(owner).get(f"/api/v1/jobs/{made.id}/history/steps?format={form}")
        return b"".join(answer.streaming_content) if form != "json" else answer.content  # type: ignore[attr-defined]

    told = json.loads(asked("json"))["columns"]["step_s"]
    assert told == [float(row["step_s"]) for row in csv.DictReader(io.StringIO(asked("csv").decode()))]
    kept = pq.read_table(io.BytesIO(asked("parquet")))["step_s"].to_pylist()
    assert [struct.pack("f", number) for number in told] == [struct.pack("f", number) for number in kept]


def test_a_csv_file_is_read_back_as_it_was_and_carries_nothing_out(owner: User, api: Api, root: Path) -> None:
    lines = ["\x1b[31mred\x1b[0m", '=1+1, "quoted"', "a\tb\x7f\x85", "back\\slash \\u0041", "", "'"]
    texts = ["=HYPERLINK(1)", "+1", "'twice", '\x1b]0;title\x07 "and" \\n', "plain, with a comma", "\t=1"]
    items: list[Any] = [{"kind": "log", "rank": 0, "time": BEGAN, "first": 0, "lines": lines}]
    items += [
        {"kind": "checkpoint", "rank": 0, "time": BEGAN + n, "step": n, "name": None, "num_bytes": 0, "stall_s": 0.1}
        | {"save_s": 0.1, "problem": text}
        for n, text in enumerate(texts, 1)
    ]
    made = Attempt.objects.create(job=actions.submit(owner, GOOD)[0], number=1)
    keep(root, [batch(1, step(0, 1, 0.5), *items)], made.job_id)

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
