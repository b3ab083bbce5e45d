"""The values that weights start from, drawn one at a time or side by side."""

from __future__ import annotations

import threading

import pytest
import torch

from planner.facts.layout import Coordinates
from planner.facts.models.shapes import Parameter, stage_units
from planner.facts.spec import JobSpec, ModelSpec
from tests.support.patience import patient
from workers.trainer.model import Decoder, Strategy, initial, initialise

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48}
MODEL = ModelSpec.model_validate(
    {"arch": "llama", "vocab_size": 256, "max_seq_len": 24, "tied_embeddings": False, **SIZES}
)


def started_from(draws: int) -> dict[str, torch.Tensor]:
    layers = range(MODEL.num_layers)
    decoder = Decoder(MODEL, layers, Strategy(), torch.float32, first=True, last=True)
    for unit in stage_units(MODEL, layers, first=True, last=True):
        initialise(decoder, unit, JobSpec(model=MODEL), Coordinates(), draws)
    return dict(decoder.named_parameters())


def test_weights_are_the_same_however_many_are_drawn_at_once() -> None:
    one, many = started_from(1), started_from(8)
    assert all(torch.equal(many[name], weights) for name, weights in one.items())
    assert one["layers.0.attention.q.weight"].std() > 0


def test_two_tensors_are_drawn_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for another that is drawn meanwhile: one after the other none would come."""
    units = stage_units(MODEL, range(MODEL.num_layers), first=True, last=True)
    (two,) = (unit._replace(parameters=unit.parameters[:2]) for unit in units if unit.name == "layers.0")
    met, whole = threading.Barrier(2), initial._whole

    def waits(parameter: Parameter, *more: object) -> torch.Tensor:
        met.wait(patient(5))
        return whole(parameter, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(initial, "_whole", waits)
    assert len(list(initial._drawn(two, JobSpec(model=MODEL), 2))) == 2


def test_ranks_of_a_host_share_its_cores_and_leave_those_of_a_cpu_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(16)))
    gpu = torch.device("cuda", 0)
    for ranks, draws in (("", 16), ("1", 16), ("8", 2), ("32", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert initial.draws_at_once(gpu) == draws
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert initial.draws_at_once(torch.device("cpu")) == 1
