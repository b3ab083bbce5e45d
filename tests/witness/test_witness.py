"""The kernel's own count of bytes agrees with the meter's: ranks on network namespaces, `ss -ti` before and after."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.wire import gloo_bytes
from tests.witness.compare import TOLERANCE, TRAINED, Seen, training_spec, watch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@pytest.fixture(scope="module", params=[2, 4])
def primitives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    seen = watch(request.param, tmp_path_factory.mktemp("witness") / "out")
    return {s.name: s for s in seen}


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
def test_a_primitive_puts_on_the_wire_what_the_meter_says(primitives: dict[str, Seen], op: str) -> None:
    seen = primitives[op]
    assert seen.payload_bytes > 0
    assert seen.ratio == pytest.approx(1.0, abs=TOLERANCE)
    if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        for modelled, wire in zip(seen.modelled, seen.wire, strict=True):
            assert wire == pytest.approx(modelled, rel=TOLERANCE, abs=4096)


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_training_run_puts_on_the_wire_what_the_meter_says(name: str, tmp_path: Path) -> None:
    spec = training_spec(TRAINED[name])
    (seen,) = watch(spec.layout.world_size, tmp_path / "out", spec)
    assert seen.ratio == pytest.approx(1.0, abs=TOLERANCE)


def test_an_operation_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no model of what gloo sends for reduce"):
        gloo_bytes("reduce", 8, 2)
