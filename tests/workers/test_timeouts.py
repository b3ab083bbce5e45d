"""No group of ours waits for as long as torch would let it."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path

import pytest

from workers.rank_environment import GROUP_TIMEOUT_VARIABLE, get_group_timeout

WORKERS = Path(__file__).parents[2] / "workers"
DRY = WORKERS / "meter" / "dry.py"  # nobody is waited for there


def test_every_group_is_told_how_long_to_wait() -> None:
    untold, seen = [], 0
    for path in WORKERS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr
            if named not in ("new_group", "init_process_group") or path == DRY:
                continue
            seen += 1
            if "timeout" not in {keyword.arg for keyword in node.keywords}:
                untold.append(f"{path.relative_to(WORKERS)}:{node.lineno}")
    assert seen > 8
    assert untold == []


def test_the_time_is_the_hosts_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_group_timeout() == timedelta(minutes=10)
    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "7")
    assert get_group_timeout() == timedelta(seconds=7)
