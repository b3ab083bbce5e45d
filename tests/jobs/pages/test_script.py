"""Your own scripts through the form and REST, up to the queue."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Host, Job
from jobs.queue import actions
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError

pytestmark = pytest.mark.django_db
Api = Callable[[User], APIClient]
GOOD: dict[str, Any] = {"kind": "script", "script": {"path": "a/train.py", "args": ["--lr", "1"]}, "layout": {"dp": 2}}

FORM = {
    "name": "mine",
    "script.path": "train.py",
    "script.args": "",
    "layout.dp": "2",
    "resources.device": "cpu",
    "resources.host": "",
}


def test_form_submits_and_copies_a_script(client: Client, owner: User) -> None:
    client.force_login(owner)
    empty = client.get("/jobs/script/").content.decode()
    assert "Run a script" in empty
    assert 'value="upload" checked' in empty
    form = {**FORM, "script.args": "--text 'two words'"}
    assert client.post("/jobs/script/", form).status_code == 302
    job = Job.objects.get()
    assert job.spec["script"] == {
        "path": "train.py",
        "module": None,
        "args": ["--text", "two words"],
        "cwd": None,
        "command": None,
        "log_pattern": None,
        "upload": None,
        "plan": None,
    }
    assert job.num_slots == 2
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "train.py --text &#x27;two words&#x27;" in page
    assert "script-title" in page
    again = client.get(f"/jobs/script/?from={job.id}").content.decode()
    assert "--text &#x27;two words&#x27;" in again
    assert 'value="hosts" checked' in again


def test_pages_escape_direction_characters(client: Client, owner: User, staff: User) -> None:
    client.force_login(owner)
    assert (
        client.post("/jobs/script/", {**FORM, "script.args": "a\u202egnp.sh --x=\u2066y \u0645\u200f"}).status_code
        == 302
    )
    job = Job.objects.get()
    Job.objects.update(wait_reason="waits \u202eneve")
    Host.objects.create(name="h", slots=1, device="cpu", memory_bytes=1, last_seen=timezone.now(), note="n\u202b")
    for path in ("/", f"/jobs/{job.id}/", f"/jobs/script/?from={job.id}", "/hosts/", "/queue/", "/"):
        page = client.get(path).content.decode()
        assert not set(page) & set("\u202b\u202e\u2066"), path
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert r"a\u202egnp.sh" in page
    assert "\u0645\u200f" in page, "Arabic, and a mark that it needs"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"script.path": ""}, "has no path, module, or command. Set one of path, module, and command."),
        ({"script.path": "../x.py"}, "outside the script root"),
        ({"script.args": "'open"}, "cannot be split into arguments: No closing quotation"),
        ({"layout.dp": "many"}, "Use a whole number."),
        ({"layout.dp": "0"}, "`layout.dp` is 0. Use at least 1."),
    ],
)
def test_form_shows_errors_at_their_fields(client: Client, owner: User, changed: dict[str, str], words: str) -> None:
    client.force_login(owner)
    form = {**FORM, **changed}
    answer = client.post("/jobs/script/", form)
    assert answer.status_code == 422
    assert words in answer.content.decode().replace("&#x27;", "'").replace("<code>", "`").replace("</code>", "`")
    assert not Job.objects.exists()


def test_rest_accepts_scripts_and_rejects_their_axes(owner: User, api: Api) -> None:
    assert api(owner).post("/api/v1/jobs", GOOD, format="json").status_code == 201
    refused = api(owner).post("/api/v1/jobs", {**GOOD, "layout": {"dp": 2, "tp": 2}}, format="json")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["message"] == (
        "`layout` sets fields other than dp, but a script job uses dp only. Set only dp."
    )
    with pytest.raises(SpecError, match="`script` is missing"):
        parse_spec({"kind": "script"})
    with pytest.raises(SpecError, match=r"`script\.args\.0` is "):
        parse_spec({"kind": "script", "script": {"path": "x.py", "args": ["a\x00b"]}})


def test_pages_show_the_command_of_a_module(client: Client, owner: User) -> None:
    client.force_login(owner)
    form = {"name": "mine", "script.module": "package.train", "script.cwd": "data", "script.args": "--lr 1"}
    ranks = {"layout.dp": "2", "resources.device": "cpu"}
    assert client.post("/jobs/script/", form | ranks).status_code == 302
    job = Job.objects.get()
    assert job.spec["script"] == {
        "path": None,
        "module": "package.train",
        "args": ["--lr", "1"],
        "cwd": "data",
        "command": None,
        "log_pattern": None,
        "upload": None,
        "plan": None,
    }
    for page in (f"/jobs/{job.id}/", "/"):
        assert "-m package.train --lr 1" in client.get(page).content.decode()
    again = client.get(f"/jobs/script/?from={job.id}").content.decode()
    assert 'value="package.train"' in again
    assert 'value="None"' not in again


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({}, "`script` has no path, module, or command. Set one of path, module, and command."),
        ({"path": "a.py", "module": "a"}, "`script` has path and module. Set one of path, module, and command."),
        ({"module": "-m"}, "`script.module` is '-m', which is not a module name."),
        ({"module": "a..b"}, "`script.module` is 'a..b', which is not a module name."),
        ({"path": "."}, "`script.path` is '.', which is a folder. Use a file in it."),
        ({"path": "a/."}, "`script.path` is 'a/.', which is a folder"),
        ({"path": "a.py/"}, "`script.path` is 'a.py/', which is a folder"),
        ({"path": "a.py\n"}, "`script.path` is 'a.py\\n', which contains a control character or a line break"),
        ({"path": "a\u2028b.py"}, "contains a control character or a line break"),
        ({"path": "-c"}, "`script.path` is '-c', which starts with '-', like a command-line option"),
        ({"module": "package.train", "cwd": "a\tb"}, "`script.cwd` is 'a\\tb', which contains a control character"),
        ({"module": "package.train", "cwd": "-a"}, "`script.cwd` is '-a', which starts with '-'"),
        ({"module": "package.train\n"}, "`script.module` is "),
        ({"path": "a.py", "cwd": "../b"}, "`script.cwd` is '../b', which is outside the script root"),
        ({"path": "a.py", "cwd": "/tmp"}, "`script.cwd` is '/tmp', which is outside the script root"),
        ({"path": "a.py", "cwd": "a\x00b"}, "`script.cwd` is "),
        (
            {"path": "mine/a.py", "cwd": "yours"},
            "`script.cwd` is 'yours'. Use 'mine', the folder of 'mine/a.py', or a folder below it.",
        ),
        ({"path": "mine/a.py", "cwd": "."}, "`script.cwd` is '.'. Use 'mine', the folder of 'mine/a.py'"),
        ({"path": "mine/a.py", "cwd": "mine2"}, "`script.cwd` is 'mine2'. Use 'mine'"),
        ({"module": "package.train", "cwd": "./"}, "`script.cwd` is './', the script root that all users share."),
    ],
)
def test_script_is_one_file_or_module_below_the_root(script: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        parse_spec({"kind": "script", "script": script})
    assert parse_spec({"kind": "script", "script": {"module": "package.train", "cwd": "data"}}).script is not None


def test_form_describes_the_model_of_the_prediction(client: Client, owner: User) -> None:
    client.force_login(owner)
    plan = {"plan_model": "gpt-tiny", "script.plan.train.global_batch": "16", "script.plan.train.seq_len": "64"}
    assert client.post("/jobs/script/", FORM | plan).status_code == 302
    job = Job.objects.get()
    assert job.spec["script"]["plan"]["model"]["preset"] == "gpt-tiny"
    assert job.spec["script"]["plan"]["train"]["global_batch"] == 16
    assert job.spec["script"]["plan"]["layout"] is None
    again = client.get(f"/jobs/script/?from={job.id}").content.decode()
    assert '<option value="gpt-tiny" selected>' in again
    wrong = client.post("/jobs/script/", FORM | plan | {"plan_model": "gpt-none"})
    assert wrong.status_code == 422
    assert "gpt-none" in wrong.content.decode()


def test_form_reads_the_model_from_a_config_of_hugging_face(client: Client, owner: User) -> None:
    client.force_login(owner)
    config = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 512}
    assert client.post("/jobs/script/", {**FORM, "plan_config": json.dumps(config)}).status_code == 302
    model = Job.objects.get().spec["script"]["plan"]["model"]
    assert (model["num_layers"], model["hidden_size"], model["vocab_size"]) == (4, 128, 512)
    wrong = client.post("/jobs/script/", {**FORM, "plan_config": '{"model_type": "mamba"}'})
    assert wrong.status_code == 422
    assert "mamba" in wrong.content.decode()


def test_form_copies_a_model_without_preset_and_its_layout(client: Client, owner: User) -> None:
    client.force_login(owner)
    model = {**parse_spec({"model": {"preset": "gpt-tiny"}}).model.model_dump(), "num_layers": 3, "preset": None}
    job, _ = actions.submit(owner, {**GOOD, "script": {"path": "x.py", "plan": {"model": model, "layout": {"tp": 2}}}})
    page = client.get(f"/jobs/script/?from={job.id}").content.decode()
    assert '<option value="copied" selected>' in page
    found = dict(re.findall(r'name="(script\.plan\.(?:model|layout))" value="([^"]*)"', page))
    hidden = {name: html.unescape(text) for name, text in found.items()}
    assert client.post("/jobs/script/", {**FORM, "plan_model": "copied", **hidden}).status_code == 302
    assert Job.objects.exclude(id=job.id).get().spec["script"]["plan"] == job.spec["script"]["plan"]
