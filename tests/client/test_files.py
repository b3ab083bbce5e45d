"""Specs in files: YAML, JSON, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshboard import spec_files
from meshboard.commands.app import ExitCode
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError
from tests.client.conftest import FakeServer, Ran

Meshboard = Callable[..., Ran]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: [1, 2, !!set {}]}", "train.steps.2: has the tag tag:yaml.org,2002:set"),
        ("name: !!timestamp 2026-11-23", "has the tag tag:yaml.org,2002:timestamp"),
        ("name: !!binary aGk=", "name: has the tag"),
        ("layout: !Layout {tp: 2}", "layout: has the tag !Layout"),
        ("layout: [", "is neither YAML nor JSON: while parsing"),
        ("layout: {<<: tp}", "layout: << needs a mapping"),
        ("name: a\ntrain:\n  steps: 1\n  steps: 2\n", "train.steps: appears twice (the second time in line 4)"),
        ("name: a\nname: b\n", "name: appears twice (the second time in line 2)"),
        ("? [a]\n: 1", "field names need to be single words"),
        ("model: &x [*x]", "contains itself"),
        ("name: " + "9" * 5000, "name: "),
        ('name: "\\ud800"', "name: "),
    ],
)
def test_rejects_values_that_json_does_not_have(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, text: str, words: str
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)
    ran = meshboard("submit", str(spec), at=server)
    assert (ran.code, ran.out, server.requests) == (ExitCode.WRONG, "", [])
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_sends_infinity_as_text_to_the_board(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("name: n\nmodel: {preset: gpt-tiny}\ntrain: {learning_rate: .inf, steps: off, weight_decay: -.NaN}")
    with pytest.raises(SpecError) as refused:
        parse_spec(spec_files.read_spec(str(file), ["train.warmup_steps=1e400", "layout.dp=.nan"]))
    values = {one.field: one.message.partition(" is ")[2].partition(". Use")[0] for one in refused.value.problems}
    assert values == {
        "layout.dp": '".nan"',
        "train.learning_rate": '".inf"',
        "train.steps": '"off"',
        "train.warmup_steps": '"1e400"',
        "train.weight_decay": '"-.NaN"',
    }


def test_reads_yaml_1_2(tmp_path: Path) -> None:
    """YAML 1.2: PyYAML's 1.1 makes of most of these something else."""
    file = tmp_path / "spec.yaml"
    file.write_text(
        "name: 2026-11-23\non: [yes, No, off, y, 12:30, 0o17, 010, 1_000, '1', 1e-3, 1.5, true, False, ~, null, ]\n"
        "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n"
    )
    assert spec_files.read_spec(str(file), ["train.verify=off", "train.steps=1e3", "train.seed=7", "empty="]) == {
        "name": "2026-11-23",
        "on": ["yes", "No", "off", "y", "12:30", 15, 10, "1_000", "1", 1e-3, 1.5, True, False, None, None],
        "base": {"a": 1, "b": 2},
        "more": {"a": 1, "b": 3},
        "train": {"verify": "off", "steps": 1e3, "seed": 7},
        "empty": None,
    }
    with pytest.raises(spec_files.SpecFileError, match=r"--set 'train.lr=!!set {}': train.lr: has the tag") as refused:
        spec_files.read_spec(str(file), ["train.lr=!!set {}"])
    assert (refused.value.field, refused.value.pointer) == ("train.lr", "/train/lr")


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_reads_json_that_pyyaml_rejects(tmp_path: Path, indent: int | str | None) -> None:
    data = {"name": "run \U0001f600", "args": ["\x7f", 1e-3, None, True], "k" * 2000: {"a": 1}}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(data, indent=indent))
    assert spec_files.read_spec(str(file)) == data


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": 1e400}', '{"a": "\\ud83d"}', '{"a": {"b": 1, "b": 1}}'])
def test_rejects_duplicate_json_fields(tmp_path: Path, text: str) -> None:
    file = tmp_path / "spec.json"
    file.write_text(text)
    with pytest.raises((spec_files.SpecFileError, SpecError), match=r"\ba\b"):
        parse_spec(spec_files.read_spec(str(file)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_reads_unicode_in_every_locale(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "spec.yaml").write_bytes("name: \u00fcn\u00ef\r\nlayout: {dp: 2}\r\n".encode(encoding))
    program = "from meshboard.spec_files import read_spec; print(ascii(read_spec('spec.yaml')), ascii(read_spec('-')))"
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    with (tmp_path / "spec.yaml").open("rb") as data:
        argv = [sys.executable, "-c", program]
        ran = subprocess.run(
            argv, cwd=tmp_path, env=environment, stdin=data, capture_output=True, text=True, check=True
        )
    spec = "{'name': '\\xfcn\\xef', 'layout': {'dp': 2}}"
    assert ran.stdout == f"{spec} {spec}\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        ("", "The spec is empty. Use a mapping."),
        ("- 1", "The spec is a list. Use a mapping."),
    ],
)
def test_reports_a_file_that_is_not_a_spec(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "spec.yaml"
    if content is not None:
        file.write_text(content)
    ran = meshboard("plan", str(file), at=server)
    assert (ran.code, "Errno" in ran.err) == (ExitCode.WRONG, False)
    assert ran.err.endswith(f"{words}\n")


@pytest.mark.parametrize("word", ["1_000", "2026_11_28", "+1_0", "0x1_0"])
def test_keeps_text_that_is_not_a_number(tmp_path: Path, word: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"name: {word}\nargs: [{word}, 1000]\n")
    assert spec_files.read_spec(str(file), [f"tags={word}"]) == {"name": word, "args": [word, 1000], "tags": word}
