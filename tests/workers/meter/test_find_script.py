"""The script of a job spec is found only below the script root."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.meter.script import Script, ScriptError, find_script_of_spec, run_script


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a script root with links that leave it under every name."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "package").mkdir(parents=True)
    for file in ("evil.py", "package/__main__.py", "package/train.py"):
        (outside / file).write_text("print('I RAN')\n")
    root.mkdir()
    (root / "evil.py").symlink_to(outside / "evil.py")
    (root / "away").symlink_to(outside / "package")
    (root / "circle").symlink_to(root / "circle")
    (root / "circle.py").symlink_to(root / "circle.py")
    (root / "good").mkdir()
    (root / "good/away").symlink_to(outside / "package")
    (root / "good/other").symlink_to(root / "other")
    (root / "other").mkdir()
    (root / "good/train.py").write_text("print('fine')\n")
    (root / "good/__main__.py").write_text("print('fine')\n")
    (root / "good.py").write_text("print('hidden by the package of that name')\n")
    (root / "link.py").symlink_to(root / "good/train.py")
    (root / "json.py").write_text("print('not the one that Python has')\n")
    return root


def find(root: Path, **script: Any) -> Script:
    spec = root.parent / "spec.json"
    spec.write_text(json.dumps({"kind": "script", "script": script}))
    return find_script_of_spec(spec, root)


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ({"path": "evil.py"}, "script.path"),
        ({"path": "away/train.py"}, "script.path"),
        ({"path": "circle"}, "script.path"),
        ({"path": "x" * 900}, "script.path"),
        ({"path": "absent.py"}, "script.path"),
        ({"module": "evil"}, "script.module"),
        ({"module": "away"}, "script.module"),
        ({"module": "away.train"}, "script.module"),
        ({"module": "circle"}, "script.module"),
        ({"module": "x" * 200}, "script.module"),
        ({"module": "http.server"}, "script.module"),
        ({"path": "good/train.py", "cwd": "good/away"}, "script.cwd"),
        ({"path": "good/train.py", "cwd": "good/absent"}, "script.cwd"),
    ],
)
def test_refuses_links_that_leave_the_root(root: Path, script: dict[str, str], field: str) -> None:
    with pytest.raises(ScriptError, match=f"^`{re.escape(field)}` is '.*', which does not exist"):
        find(root, **script)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ({"path": "good"}, "`script.path` is 'good', which is a folder. Use a file."),
        (
            {"path": "good/train.py", "cwd": "good/train.py"},
            "`script.cwd` is 'good/train.py', which is a file. Use a folder.",
        ),
        (
            {"path": "good/train.py", "cwd": "good/other"},
            "`script.cwd` is 'good/other', which is outside the script folder 'good'.",
        ),
    ],
)
def test_reports_folder_in_place_of_file(root: Path, script: dict[str, str], problem: str) -> None:
    with pytest.raises(ScriptError, match=f"^{re.escape(problem)}$"):
        find(root, **script)


def test_finds_scripts_below_the_root(root: Path) -> None:
    file, folder = root / "good/train.py", root / "good"
    for path in ("good/train.py", "link.py", "good/./train.py"):
        assert find(root, path=path)[:1] == (file,)
        assert find(root, path=path)[4:] == (folder, folder)
    assert find(root, path="good/train.py", cwd="good").cwd == folder
    assert find(root, path="link.py", cwd="good").cwd == folder
    assert find(root, module="good.train")[4:] == (root, root)
    assert find(root, module="good").file == folder / "__main__.py"


def test_refuses_module_that_python_finds_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = find(root, module="json")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(root)
    assert run_script(script) == 2
    said = capsys.readouterr()
    assert "error: `script.module` is 'json' in " in said.err
    assert "but Python finds" in said.err
    assert said.out == ""
