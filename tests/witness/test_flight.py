"""Compare the calls of torch's flight recorder with those of the meter by group and bytes, in order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.cases import Case, write_data
from tests.support.ranks import run_ranks

RANKS = 4
FLOWN: dict[str, Any] = {
    "primitives": None,
    "dp2 x tp2": Case("gpt", "dp2 x tp2").spec.model_dump(mode="json"),
    "zero3 dp2 x tp2 sp": Case("llama", "zero3 dp2 x tp2 sp").spec.model_dump(mode="json"),
}


@pytest.fixture(scope="module")
def recorded_calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the calls by rank and work. One set of processes runs all work."""
    folder = tmp_path_factory.mktemp("flight")
    write_data(folder)
    done = run_ranks(RANKS, "tests.witness.flight", str(folder), json.dumps(FLOWN), TORCH_FR_BUFFER_SIZE="5000")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"flight-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", list(FLOWN))
def test_meter_matches_the_flight_recorder_call_by_call(recorded_calls: list[dict[str, Any]], name: str) -> None:
    for calls in recorded_calls:
        assert len(calls[name]["recorded"]) > 5
        assert calls[name]["metered"] == calls[name]["recorded"]
