"""When a calibration waits for a GPU."""

from __future__ import annotations

import pytest
import torch

from workers.calibrate.timing import _time_calls


def test_a_gpu_is_waited_for_once_after_a_row_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step does: after each, a product of a few microseconds was measured with the wait in it."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: told.append("waited"))
    _time_calls(lambda: told.append("ran"), 3, torch.device("cuda"))
    assert told == ["ran", "ran", "ran", "waited"]
