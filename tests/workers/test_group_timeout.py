"""Every process group has the timeout of the host."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path

import pytest

from workers.rank_environment import GROUP_TIMEOUT_VARIABLE, get_group_timeout

WORKERS = Path(__file__).parents[2] / "workers"
DRY_RUN = WORKERS / "dry_run.py"  # no rank waits there


def test_every_group_has_the_timeout() -> None:
    missing, seen = [], 0
    for path in WORKERS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr
            if named not in ("new_group", "init_process_group") or path == DRY_RUN:
                continue
            seen += 1
            if "timeout" not in {keyword.arg for keyword in node.keywords}:  # type: ignore[attr-defined]
                missing.append(f"{path.relative_to(WORKERS)}:{node.lineno}")  # type: ignore[attr-defined]
    assert seen > 8
    assert missing == []


def test_timeout_is_a_setting_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_group_timeout() == timedelta(minutes=10)
    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "7")
    assert get_group_timeout() == timedelta(seconds=7)
