"""Output and exit codes of the commands."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from meshboard import Client, follow, formatting, live_display, text_reports
from meshboard.client import Job
from meshboard.commands import app
from meshboard.commands import jobs as running_commands
from meshboard.commands.app import EXIT_MEANINGS, ExitCode
from meshboard.follow import follow_progress, get_stored_progress
from meshboard.live_display import OpenLines
from tests.client.conftest import FakeServer, Ran, answer
from tests.client.test_api import ENDED, JOB

Meshboard = Callable[..., Ran]
README = Path(__file__).resolve().parents[2] / "client/README.md"
STEPS = {
    "step": [11, 12, 12],
    "rank": [0, 1, 0],
    "loss": [None, 2.5, None],
    "step_s": [0.4, 0.6, 0.5],
}


def leaves(found: Any, path: str = "") -> dict[str, Any]:
    """Every command with its words, those of groups too."""
    if not hasattr(found, "commands"):
        return {path.strip(): found}
    return {
        name: leaf for word, inner in found.commands.items() for name, leaf in leaves(inner, f"{path} {word}").items()
    }


def test_lists_jobs_of_a_board_without_projects(server: FakeServer, meshboard: Meshboard) -> None:
    brief = {"id": "j", "status": "running", "name": "n", "owner": "ann", "created": "today"}
    server.respond_at("jobs", [{**brief, "project": "team"}, brief])
    shown = meshboard("status", "--project", "team", at=server).out.splitlines()
    assert [line.split()[3] for line in shown] == ["project", "team", "-"]
    assert server.requests == ["GET /api/v1/jobs?project=team&limit=20"]


def test_rejects_timeout_without_wait(server: FakeServer, meshboard: Meshboard, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: n")
    ran = meshboard("submit", str(tmp_path / "spec.yaml"), "--timeout", "60", at=server)
    assert (ran.code, ran.out, server.requests) == (ExitCode.WRONG, "", [])
    assert "--timeout needs --wait or --follow." in ran.err


def test_filters_apply_only_to_lists(server: FakeServer, meshboard: Meshboard) -> None:
    server.respond_at("jobs", [])
    assert meshboard("status", "--tag", "a b", "--owner", "ann", "--mine", at=server).code == ExitCode.OK
    assert server.requests == ["GET /api/v1/jobs?tag=a+b&owner=ann&whose=mine&limit=20"]
    for option in (
        ["--state", "failed"],
        ["--project", "p"],
        ["--tag", "t"],
        ["--kind", "lab"],
        ["--owner", "o"],
        ["--mine"],
    ):
        ran = meshboard("status", "j", *option, at=server)
        assert (ran.code, ran.out, "work only without a job id. Omit these options, or omit j." in ran.err) == (
            ExitCode.WRONG,
            "",
            True,
        )


def test_sends_several_filter_values_as_one_list(server: FakeServer, meshboard: Meshboard) -> None:
    server.respond_at("jobs", [])
    meshboard("status", "--state", "running,queued", "--state", "lost", at=server)
    meshboard("status", "--kind", "train", "--kind", "script", "--tag", "a", "--tag", "b", at=server)
    with Client(server.url, "t") as board:
        assert list(board.jobs(kind=["lab"], tag=("a", "b"), owner="ann")) == []
    assert server.requests == [
        "GET /api/v1/jobs?status=running%2Cqueued%2Clost&limit=20",
        "GET /api/v1/jobs?kind=train%2Cscript&tag=a%2Cb&limit=20",
        "GET /api/v1/jobs?kind=lab&tag=a%2Cb&owner=ann",
    ]


def test_every_command_has_json_and_no_token_option() -> None:
    options = {
        name: {word for option in leaf.params for word in option.opts}
        for name, leaf in leaves(typer.main.get_command(app)).items()
    }
    assert [name for name, known in options.items() if "--json" not in known] == ["meter"], "the help names the program"
    assert {word for known in options.values() for word in known if "token" in word} == {"--token-file"}


def test_readme_lists_the_exit_codes() -> None:
    text = README.read_text()
    for code in ExitCode:
        assert f"| {code.value} | {EXIT_MEANINGS[code]} |" in text
    content = " ".join(typer.main.get_command(app).help.split())  # type: ignore[union-attr]
    assert all(f"{code.value} {EXIT_MEANINGS[code].split('. ')[0]}" in content for code in ExitCode)


def test_prints_the_version_without_a_board(meshboard: Meshboard, server: FakeServer) -> None:
    ran = meshboard("--version", at=server)
    assert (ran.code, ran.out, server.requests) == (0, f"meshboard {metadata.version('meshboard-client')}\n", [])
    assert "--version" in meshboard("--help").out


@pytest.mark.parametrize("inputs", [["mbt_secret"], ["--token", "mbt_secret"], ["--token=mbt_secret"]])
def test_rejects_a_token_on_the_command_line(meshboard: Meshboard, inputs: list[str]) -> None:
    ran = meshboard("login", "https://board.example", *inputs)
    assert (ran.code, ran.out) == (2, "")
    assert "--token-file" in ran.err
    assert "mbt_secret" not in ran.err


def test_login_stores_accepted_credentials(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "config/meshboard/login.json"
    server.respond_at("jobs", {"errors": [{"field": "request", "message": "no such token"}]}, 401)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"secret\n")))
    refused = meshboard("login", server.url, "--token-file", "-")
    assert (refused.code, "no such token" in refused.err, saved.exists()) == (3, True, False)
    server.respond_at("jobs", [])
    file = tmp_path / "token"
    file.write_text("secret\n")
    ran = meshboard("login", server.url, "--token-file", str(file), "--json")
    assert (ran.code, json.loads(ran.out)) == (0, {"url": server.url, "kept": str(saved)})
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert json.loads(saved.read_text()) == {"url": server.url, "token": "secret"}
    assert "secret" not in ran.out + ran.err
    assert json.loads(meshboard("logout", "--json").out) == {"forgotten": True}
    assert not saved.exists()


@pytest.mark.parametrize(
    ("status", "code"), [(422, 2), (404, 2), (409, 2), (401, 3), (403, 3), (429, 3), (500, 3), (503, 3)]
)
def test_prints_a_refused_request_as_one_line(meshboard: Meshboard, server: FakeServer, status: int, code: int) -> None:
    server.respond((status, {"errors": [{"field": "layout.tp", "message": "4 = 3 + 1"}]}))
    ran = meshboard("status", "j", at=server)
    assert ran == (code, "", "meshboard: layout.tp: 4 = 3 + 1\n")


def test_submit_prints_the_id_and_waits(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    server.respond_at("jobs", JOB, 201)
    server.respond_at("jobs/j", JOB)
    server.respond_at("jobs/j/wait", {"reached": True, "job": {**ENDED, "history": [{"reason": "all 2 ranks ended"}]}})
    ran = meshboard("submit", str(spec), "--wait", "--key", "build-1", at=server)
    assert (ran.code, ran.out) == (0, "j\n")
    lines = ran.err.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["j", "running"], ["j", "succeeded"]]
    assert "\x1b" not in ran.err, "no escapes in a CI log"
    server.respond_at("jobs/j/wait", {"reached": True, "job": {**ENDED, "status": "failed"}})
    assert meshboard("submit", str(spec), "--wait", at=server).code == ExitCode.FAILED
    server.respond_at("jobs/j/wait", {"reached": False, "job": JOB})
    assert meshboard("wait", "j", "--timeout", "0", at=server).code == ExitCode.LATE


def test_submits_a_job_that_does_not_fit_with_an_option(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    server.respond_at("jobs", JOB, 201)
    assert meshboard("submit", str(spec), "--allow-unfit", at=server).code == 0
    assert meshboard("submit", str(spec), at=server).code == 0
    assert [json.loads(body) for body in server.bodies] == [{"name": "n", "allow_unfit": True}, {"name": "n"}]


def running(server: FakeServer, **traffic: Any) -> None:
    """A job at step 12 whose recorder was heard until second 1,000."""
    saved = {"attempt": 1, "ended": False, "from": 900.0, "to": 1000.4}
    server.respond_at(
        "jobs/j", {**JOB, "spec": {"train": {"steps": 40}}, "diagnosis": {"sentence": "Well.", "next": ""}}
    )
    server.respond_at("jobs/j/history", {"job": "j", "attempts": [saved]})
    server.respond_at("jobs/j/history/steps", {"columns": {"last_step": [12], **STEPS}})
    columns = {"time": [970.0, 995.0, 999.0], "axis": ["dp", "tp", "tp"], "payload_bytes": [300, 1000, 9240], **traffic}
    server.respond_at("jobs/j/history/traffic", {"columns": columns})


def test_stored_progress_has_the_newest_step_and_rates(server: FakeServer, board: Client) -> None:
    running(server)
    seen = get_stored_progress(board, board.job("j"))
    assert (seen.step, seen.loss, seen.step_s) == (12, 2.5, 0.5), "step time of rank 0, loss of any rank"
    assert seen.rates == {"dp": 0.0, "tp": 1024.0}, "bytes of the last ten seconds"
    assert seen.curves["tp"][-5:] == [1000, 0, 0, 0, 9240]
    at = "step 12/40  loss 2.5  last step 500 ms"
    assert live_display.format_progress(seen) == f"running  {at}  dp 0 B/s  tp 1 KiB/s (mean of 10 s)"
    assert seen.as_json()["bytes_per_s"] == {"dp": 0.0, "tp": 1024.0}
    ended = seen._replace(job=Job({**seen.job.detail, "status": "succeeded", "finished": True}))
    assert live_display.format_progress(ended) == f"succeeded  {at}", "its last seconds are no step's"
    server.respond_at("jobs/j/history", {"errors": []}, 404)
    assert get_stored_progress(board, board.job("j")).rates == {}, "a new job has no history"


def test_ignores_trainer_steps_in_the_spec_of_a_script(server: FakeServer, board: Client) -> None:
    running(server)
    spec = {"kind": "script", "train": {"steps": 50}}
    server.respond_at("jobs/j", {**JOB, "status": "running", "finished": False, "spec": spec})
    assert board.job("j").steps is None
    assert live_display.format_progress(get_stored_progress(board, board.job("j"))).startswith("running  step 12  loss")


def test_plan_of_a_script_has_no_estimate(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text('{"kind": "script"}')
    server.respond_at("plan", {"estimate": None, "problems": [], "not_runnable": [], "choices": {}})
    ran = meshboard("plan", str(tmp_path / "spec.json"), at=server)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "Meshboard has no estimate for jobs of this kind.\n"


def test_plan_of_a_config_prints_parameters_and_notes(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = {"model": {"max_seq_len": 64}, "parameters": 1_234, "notes": ["The plan leaves out `x`."]}
    server.respond_at("plan/import-model", found)
    server.respond_at("plan", {"estimate": None, "problems": [], "not_runnable": [], "choices": {}})
    ran = meshboard("plan", "--config", str(tmp_path / "config.json"), at=server)
    assert (ran.code, ran.err) == (0, "1,234 parameters\nThe plan leaves out `x`.\n")


def test_plan_of_a_layout_file_prints_what_was_assumed(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "train.toml").write_text("[parallelism]\ndata_parallel_shard_degree = -1\n")
    spec = {"layout": {"dp": 8}, "train": {"seq_len": 64}, "resources": {"stack": "fsdp2"}, "model": {"preset": "gpt2"}}
    found = {"tool": "torchtitan", "ranks": 8, "spec": spec, "notes": ["A note."], "assumed": ["An assumption."]}
    server.respond_at("plan/import-layout", {**found, "not_understood": ["a.b", "c"]})
    server.respond_at("plan", {"estimate": None, "problems": [], "not_runnable": [], "choices": {}})
    ran = meshboard("plan", "--layout", str(tmp_path / "train.toml"), "--ranks", "8", "--set", "layout.tp=2", at=server)
    lines = ["Layout of torchtitan for 8 ranks.", "A note.", "An assumption.", "Not understood: a.b, c."]
    assert (ran.code, ran.err.splitlines()) == (0, lines)
    imported, planned = (json.loads(body) for body in server.bodies if body)
    assert (imported["ranks"], imported["text"][:13]) == (8, "[parallelism]")
    assert planned["layout"] == {"dp": 8, "tp": 2}
    assert planned["train"] == {"precision": "bf16", "seq_len": 64}
    assert planned["resources"] == {"device": "cuda", "stack": "fsdp2"}
    assert meshboard("plan", "--layout", "/none", at=server).err.endswith("/none: No such file or directory\n")
    assert meshboard("plan", "--ranks", "8", at=server).code == ExitCode.WRONG


def test_measured_steps_are_sent_with_a_plan_and_a_search(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "spec.json").write_text('{"name": "n"}')
    server.respond_at("plan", {"estimate": None, "problems": [], "not_runnable": [], "choices": {}})
    options = ["--measured-step", "tp=2,recompute=full,micro_batches=8,step_s=1.35", "--measured-step", "layout.dp=4"]
    assert meshboard("plan", str(tmp_path / "spec.json"), *options, at=server).code == 0
    layout = {"tp": 2, "recompute": "full"}
    steps = [{"layout": layout, "micro_batches": 8, "step_s": 1.35}, {"layout": {"dp": 4}}]
    assert json.loads(server.bodies[-1]) == {"name": "n", "measured_steps": steps}
    meshboard("search", "--ranks", "8", str(tmp_path / "spec.json"), *options[:2], at=server)
    assert json.loads(server.bodies[-1])["measured_steps"] == steps[:1]
    ran = meshboard("plan", str(tmp_path / "spec.json"), "--measured-step", "1.35", at=server)
    assert (ran.code, ran.err) == (
        ExitCode.WRONG,
        "meshboard: --measured-step 'layout.1.35': Use FIELD=VALUE, such as layout.dp=2.\n",
    )


def test_plan_needs_a_spec_or_a_config(meshboard: Meshboard, server: FakeServer) -> None:
    ran = meshboard("plan", at=server)
    assert ran.code == ExitCode.WRONG
    assert ran.err.endswith("SPEC is missing. Add a spec, or use --config FILE or --layout FILE.\n")


def test_shows_the_final_verdict_of_an_ended_run(meshboard: Meshboard, server: FakeServer) -> None:
    content = {"sentence": "Runs: 102 ms a step", "reason": "", "next": "", "over": False}
    failed = {**ENDED, "status": "failed", "history": [{"reason": "rank 1 was killed"}]}
    server.respond_at("jobs/j", {**failed, "diagnosis": content})
    assert meshboard("status", "j", at=server).out == "j  failed       n  (rank 1 was killed)\n"
    server.respond_at("jobs/j", {**failed, "diagnosis": {**content, "sentence": "Rank 1 failed first", "over": True}})
    assert meshboard("status", "j", at=server).out.endswith("\nRank 1 failed first\n")


@pytest.mark.parametrize("named", [("j",), ("j", "j"), ("a", "b", "c", "d", "e", "f", "g")])
def test_compare_rejects_too_few_or_too_many_jobs(
    meshboard: Meshboard, server: FakeServer, named: tuple[str, ...]
) -> None:
    ran = meshboard("compare", *named, at=server)
    assert (ran.code, server.requests) == (ExitCode.WRONG, [])
    assert "Use 2 to 6 different job ids, separated by spaces, not " in ran.err


def test_reports_an_address_without_a_board(meshboard: Meshboard, server: FakeServer) -> None:
    server.answers = [answer(404, b"<html>not here</html>")]
    ran = meshboard("status", "j", at=server)
    assert ran.code == ExitCode.WRONG
    assert "Check that MESHBOARD_URL is the address of a board" in ran.err


def test_watch_continues_until_the_job_ends(meshboard: Meshboard, server: FakeServer) -> None:
    running(server)
    server.respond_at("jobs/j", {**ENDED, "status": "failed", "history": [{"reason": "rank 1 was killed"}]})
    ran = meshboard("watch", "j", at=server)
    assert (ran.code, ran.out.count("\n")) == (1, 2)
    assert ran.out.startswith("failed  step 12  loss 2.5")
    assert ran.out.endswith("\nrank 1 was killed\n")
    content = json.loads(meshboard("watch", "j", "--json", at=server).out)
    assert (content["step"], content["bytes_per_s"]["tp"]) == (12, 1024.0)


def sent(at: float, *seconds: tuple[int, str, int]) -> bytes:
    content = [{"second": second, "axis": axis, "bytes": num_bytes} for second, axis, num_bytes in seconds]
    return event("traffic", {"attempt": 1, "at": at, "sent": content})


def test_watch_shows_live_events(
    meshboard: Meshboard, server: FakeServer, board: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder, some seconds behind, has nothing to say until the job is over."""
    monkeypatch.setattr("meshboard.follow.MAX_JITTER_S", 1.0)  # every look
    server.respond_at("jobs/j/history", {"errors": []}, 404)
    step = {"attempt": 1, "step": 7, "loss": 3.0, "step_s": 0.25}
    server.at["jobs/j/events"] = answer(
        200,
        event("state", {"status": "running", "attempt": 1})
        + event("step", step)
        + sent(1000.5, (990, "tp", 1000), (998, "tp", 1000), (999, "tp", 512), (1000, "tp", 9))
        + event("step", {**step, "step": 8, "loss": None})
        + sent(1030.5)
        + event("end", {"status": "succeeded", "attempt": 1}),
    )
    server.answers = [answer(200, JOB), answer(200, ENDED), answer(200, ENDED)]
    ran = meshboard("watch", "j", "--json", at=server)
    content = [json.loads(line) for line in ran.out.splitlines()]
    assert [(one["step"], one["loss"], one["bytes_per_s"]) for one in content[2:-1]] == [
        (7, 3.0, {"tp": (1000 + 1000 + 512) / 10}),
        (8, 3.0, {"tp": (1000 + 1000 + 512) / 10}),
        (8, 3.0, {"tp": 0.0}),
    ], "rates count complete seconds"
    assert (ran.code, content[-1]["status"]) == (0, "succeeded")
    assert (content[-1]["step"], content[-1]["loss"], content[-1]["step_s"]) == (8, 3.0, 0.25), (
        "the last live step stays"
    )
    assert "GET /api/v1/jobs/j/events?live=30" in server.requests


def test_watch_polls_an_older_board_without_live_events(
    meshboard: Meshboard, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(server)
    del server.at["jobs/j"]
    monkeypatch.setattr(running_commands.time, "sleep", lambda _seconds: None)
    server.respond_at("jobs/j/events", {"errors": [{"field": "live", "message": "is not a parameter of this"}]}, 400)
    server.answers = [answer(200, JOB), answer(200, ENDED)]
    ran = meshboard("watch", "j", at=server)
    assert (ran.code, [line.split()[0] for line in ran.out.splitlines()]) == (0, ["running", "succeeded"])


def test_search_without_results_lists_the_reasons(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    counted = {
        "considered": 120,
        "total": 900,
        "fitting": 0,
        "complete": False,
        "refused": {"memory: model state alone": 120},
    }
    server.respond_at("plan/search", {"best": [], "cluster": {"name": "vm"}, **counted})
    ran = meshboard("search", str(tmp_path / "spec.json"), "--ranks", "2", at=server)
    assert (ran.code, ran.out) == (ExitCode.FAILED, "No layout fits in memory.\n")
    assert ran.err.splitlines() == [
        "checked 120 layouts of 900; 0 fit in memory on vm",
        "rejected 120: memory: model state alone",
    ]
    ran = meshboard("search", str(tmp_path / "spec.json"), "--ranks", "2", "--json", at=server)
    assert (ran.code, json.loads(ran.out)["refused"]) == (ExitCode.FAILED, counted["refused"])


def test_draws_progress_on_a_terminal(server: FakeServer, board: Client) -> None:
    running(server)
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, markup=False)
    with live_display.WatchDisplay(console=screen) as watching:
        watching(get_stored_progress(board, board.job("j")))
    content = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "tp    1 KiB/s" in content
    assert live_display.format_curve([0, 1, 1000]) == " ▁█", "the smallest is seen"
    assert "Well." in content
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, markup=False)
    with live_display.WaitDisplay(console=screen) as waiting:
        waiting(Job({**JOB, "spec": {"train": {"steps": 40}}}))
        waiting.update_step(get_stored_progress(board, board.job("j")))
    assert "12/40" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_watch_shows_the_loss_of_a_script_with_its_source(
    meshboard: Meshboard, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshboard.follow.MAX_JITTER_S", 1.0)  # every look
    content = {"attempt": 1, "step": 8, "loss": None, "step_s": 0.5}
    reported = {"attempt": 1, "step": 10, "loss": 2.5, "source": "log line"}
    server.at["jobs/j/events"] = answer(200, event("step", content) + event("loss", reported) + event("end", {}))
    detail = {**ENDED, "diagnosis": {"loss": {**reported, "loss": None, "not_finite": "nan", "source": "wandb"}}}
    server.respond_at("jobs/j/history", {"errors": []}, 404)
    server.answers = [answer(200, JOB), answer(200, detail)]
    ran = meshboard("watch", "j", at=server)
    assert "step 8" in ran.out
    assert "loss 2.5 (log line)" in ran.out
    assert "loss nan (wandb)" in ran.out


def test_shows_no_stale_loss_after_a_nan(meshboard: Meshboard, server: FakeServer) -> None:
    content = {"attempt": 1, "step_s": 0.5}
    steps = [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
        {"step": 3, "loss": None, "not_finite": "loss is nan"},
    ]
    server.at["jobs/j/events"] = answer(
        200, b"".join(event("step", {**content, **one}) for one in steps) + event("end", {})
    )
    server.respond_at("jobs/j", JOB)
    job = Job(JOB)
    with Client(server.url, "t") as board:
        assert [seen.loss for seen in follow_progress(board, job)][:3] == [2.5, 2.5, None]


def test_removes_escapes_from_logs_on_a_terminal(meshboard: Meshboard, server: FakeServer) -> None:
    server.at["jobs/j/logs/1"] = answer(200, b"one\ntwo \xff\x1b[31m")
    ran = meshboard("logs", "j", "--rank", "1", "--json", at=server)
    assert [json.loads(line) for line in ran.out.splitlines()] == [
        {"rank": 1, "line": "one"},
        {"rank": 1, "line": "two �\x1b[31m"},
    ]
    assert formatting.format_log_line("\x1b[31mred\x1b[0m\ta\x1b]8;;javascript:x\x07b\x9b2J 10%\r 20%\r") == " 20%"
    assert formatting.format_log_line("\x1b[31mred\x1b[0m\ta\x1b]52;c;eA==\x07b\x9b2Jc\x08") == "red\tabc?"
    assert "\x1b" not in text_reports.format_job_line(Job({**JOB, "name": "\x1b[31mred\nnext"}))


def event(name: str, data: Any, place: str = "") -> bytes:
    return (f"id: {place}\n" * bool(place) + f"event: {name}\ndata: {json.dumps(data)}\n\n").encode()


def log(first: int, *lines: str, skipped: int = 0, place: str = "") -> bytes:
    return event("log", {"rank": 0, "first": first, "lines": lines, "skipped": skipped}, place)


def test_follows_a_log_without_repeated_or_lost_lines(meshboard: Meshboard, server: FakeServer) -> None:
    """The job waits first; then the line breaks in the middle of an event, and before that one had no id."""
    server.at["jobs/j"] = answer(200, JOB)
    begun, ended = log(0, "a", "b", place="1.1.0.0:1-0"), {"reached": False, "job": ENDED}
    server.answers = [
        answer(409, {"errors": [{"field": "log", "message": "it has not started"}]}),
        answer(200, {"reached": True, "job": JOB}),
        answer(200, b"retry: 3000\n\n" + begun + b": still here\n\n" + log(2, "c") + b"event: l"),
        answer(502, b"<html>"),
        answer(200, log(2, "c", "d") + log(9, "e", skipped=5) + event("gap", {}) + log(20, "f") + event("end", {})),
        answer(200, ended),
    ]
    ran = meshboard("logs", "j", "-f", at=server)
    assert ran.out.splitlines() == [
        "a",
        "b",
        "c",
        "d",
        "[5 log lines are missing here, because they are not stored]",
        "e",
        follow.GAP,
        "f",
    ]
    assert (ran.code, server.resumed) == (0, ["1.1.0.0:1-0", "1.1.0.0:1-0"])


class Terminal(io.StringIO):
    """A stream that counts as a terminal."""

    def isatty(self) -> bool:
        return True


def test_follows_the_state_of_a_progress_bar_on_a_terminal(server: FakeServer) -> None:
    server.at["jobs/j"] = answer(200, JOB)
    bars = [event("log", {"rank": 0, "first": 1, "lines": [], "skipped": 0, "open": [f"{n}%"]}) for n in (10, 20)]
    last = event("log", {"rank": 0, "first": 1, "lines": ["100%"], "skipped": 0, "open": []})
    server.answers = [answer(200, log(0, "a") + b"".join(bars) + last + event("end", {}))]
    output = Terminal()
    with Client(server.url, "t") as board:
        screen = OpenLines(output)
        for line in follow.follow_attempt(board, "j", 0, 1, screen.show):
            screen.erase()
            output.write(f"{line}\n")
    assert output.getvalue() == "a\n10%\n\x1b[1A\x1b[J20%\n\x1b[1A\x1b[J100%\n"


def test_prints_a_log_as_shown_or_as_written(meshboard: Meshboard, server: FakeServer) -> None:
    server.answers = [answer(200, b"100%\n"), answer(200, b"10%\\100%\n")]
    assert meshboard("logs", "j", at=server).out == "100%\n"
    assert meshboard("logs", "j", "--raw", at=server).out == "10%\\100%\n"
    assert server.requests == ["GET /api/v1/jobs/j/logs/0?text=terminal", "GET /api/v1/jobs/j/logs/0"]
    assert "`--raw` cannot be used with --follow or --json" in meshboard("logs", "j", "--raw", "-f", at=server).err
    too_old = answer(422, {"errors": [{"field": "text", "message": "is unknown"}]})
    server.answers = [too_old, answer(200, b"as written\n")]
    assert meshboard("logs", "j", at=server).out == "as written\n"


def test_reports_a_revoked_right_to_a_log(meshboard: Meshboard, server: FakeServer) -> None:
    server.at["jobs/j"] = answer(200, JOB)
    problem = {"status": 401, "errors": [{"field": "request", "message": "the token was revoked"}]}
    server.answers = [answer(200, log(0, "a", place="1.1.0.") + event("error", problem))]
    ran = meshboard("logs", "j", "-f", at=server)
    assert ran == (3, "a\n", "meshboard: request: the token was revoked\n")


def test_compares_runs_in_columns(meshboard: Meshboard, server: FakeServer) -> None:
    part = {"step_s": 0.5, "data_s": 0.0, "optimizer_s": 0.01, "exposed": {"tp": 0.2}, "hidden": {}}
    curve = {"step": [1, 5], "loss": [4.0, 2.0], "tokens_s": [None, 2048.0]}
    gather = {"axis": "tp", "op": "all_gather", "payload_bytes": 2048}
    one = {"job": "a", "name": "with", "parts": part, "curve": curve, "traffic": [gather]}
    two = {"job": "b", "name": "without", "parts": None, "curve": {"loss": [3.0, None]}, "traffic": []}
    difference = {"field": "layout.sequence_parallel", "values": [True, False]}
    server.respond_at("compare", {"jobs": [one, two], "differences": [difference]})
    rows = [line.split("  ") for line in meshboard("compare", "a", "b", at=server).out.splitlines()]
    content = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert content["layout.sequence_parallel"] == ["True", "False"]
    assert content["mean step time"] == ["500 ms", "-"]
    assert content["mean time per step for tp, exposed"] == ["200 ms", "-"]
    assert content["bytes.tp.all_gather, total"] == ["2,048 B (2 KiB)", "-"]
    assert content["final loss"] == ["2", "-"], "whatever it was before it was no number"
    assert server.requests[-1] == "GET /api/v1/compare?jobs=a%2Cb"
