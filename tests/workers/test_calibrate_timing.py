"""A calibration synchronizes the GPU once per measurement."""

from __future__ import annotations

import pytest
import torch

from workers.calibrate.measurements import _time_calls


def test_synchronizes_once_after_consecutive_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronization per run would dominate a matmul of a few microseconds."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: told.append("waited"))
    _time_calls(lambda: told.append("ran"), 3, torch.device("cuda"))
    assert told == ["ran", "ran", "ran", "waited"]
