"""The reference replays the expert choices of a run, and detects wrong routers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.telemetry.results import ProofItem
from planner.facts.single_process_reference import format_tolerances, get_tolerances
from tests.parity.cases import make_spec, write_data
from tests.parity.rank import make_trainer
from tests.support.ranks import run_ranks
from workers.meter import Recorder
from workers.trainer.errors import VerificationError
from workers.trainer.model.moe import Routing, make_routing
from workers.trainer.trainer import RunHooks, Trainer
from workers.trainer.verification import RunVerifier
from workers.trainer.verification.reference import RoutingRecorder, iter_routers


def mixture(folder: Path, **request: Any) -> Trainer:
    write_data(folder)
    spec = make_spec("moe", {"recompute": "full"}, 2, train={"steps": 4, **request})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": 2})})
    return make_trainer(spec, folder, Recorder(0))


def proven(trainer: Trainer) -> list[ProofItem]:
    messages: list[ProofItem] = []
    items: Any = lambda item: messages.append(item) if item["kind"] == "proof" else None  # noqa: E731
    trainer.train(RunHooks(items, lambda _line: None, verifier=RunVerifier(trainer, items, lambda _line: None)))
    return messages


def wrongly(trainer: Trainer, tokens: int) -> None:
    """Route some tokens of the last layer to their least probable expert."""

    def route(_router: Any, _inputs: Any, routing: Routing) -> Routing:
        experts = routing.experts.clone()
        experts.flatten(0, 1)[:tokens, -1] = routing.probabilities.flatten(0, 1)[:tokens].argmin(-1)
        gates = routing.probabilities.gather(-1, experts)
        return make_routing(experts, gates, routing.probabilities, routing.gates.dtype)

    list(iter_routers(trainer))[-1][1].register_forward_hook(route)


def test_replays_choices_that_rounding_changed(tmp_path: Path) -> None:
    """With few rows, one changed choice has the effect of a fault."""
    last = proven(mixture(tmp_path, precision="bf16", seq_len=16))[-1]
    one, end = last["one_process"], last["end"]
    assert (one["state"], end["state"]) == ("equal", "equal")
    assert one["choices"]["tokens"] == end["choices"]["tokens"] == 2 * 8 * 16, "layers x tokens"
    assert max(one["gradient"], end["gradient"]) < 0.1


def test_no_choice_differs_in_fp32(tmp_path: Path) -> None:
    one = proven(mixture(tmp_path))[-1]["one_process"]
    assert one["choices"]["turned"] == 0
    assert one["gradient"] < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_detects_one_token_with_a_wrong_expert(tmp_path: Path, precision: str) -> None:
    trainer = mixture(tmp_path, precision=precision)
    wrongly(trainer, 1)
    with pytest.raises(VerificationError, match=r"choice of layers\.\d+\.moe\.router differs from the reference by"):
        proven(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_detects_a_token_with_a_duplicate_expert(tmp_path: Path, precision: str) -> None:
    """A duplicate expert has a larger smallest gate than the correct choice."""
    trainer = mixture(tmp_path, precision=precision)

    def route(_router: Any, _inputs: Any, routing: Routing) -> Routing:
        experts = routing.experts.clone()
        experts.flatten(0, 1)[0, -1] = experts.flatten(0, 1)[0, 0]
        gates = routing.probabilities.gather(-1, experts)
        return make_routing(experts, gates, routing.probabilities, routing.gates.dtype)

    list(iter_routers(trainer))[-1][1].register_forward_hook(route)
    with pytest.raises(
        VerificationError, match=r"choice of layers\.\d+\.moe\.router differs from the reference with NaN"
    ):
        proven(trainer)


def test_records_choices_per_micro_batch_and_drops_them(tmp_path: Path) -> None:
    trainer = mixture(tmp_path, micro_batches=2)
    chosen = RoutingRecorder(trainer, on=True)
    trainer.forward_backward(0)
    chosen.end_step()
    assert chosen.num_bytes > 0
    (step,) = chosen.take()
    assert chosen.num_bytes == 0
    spec = trainer.spec
    for experts in step.values():
        assert experts.shape[:2] == (spec.train.global_batch, spec.train.seq_len)
        assert int(experts.min()) >= 0, "none is missing"
    trainer.forward_backward(1)
    chosen.end_step()
    assert chosen.num_bytes == 0, "it is off until it is asked again"


def test_mixture_models_have_the_same_limits_and_a_choice_limit() -> None:
    for precision in ("fp32", "bf16", "fp8"):
        mixed, plain = (make_spec(model, {}, 2, train={"precision": precision}) for model in ("moe", "llama"))
        assert get_tolerances(mixed) == get_tolerances(plain)
        assert f", {get_tolerances(mixed).router_choice:g} in router choices" in format_tolerances(
            mixed, get_tolerances(mixed), mixed.train.precision
        )


def test_gates_follow_from_probabilities_and_choices(tmp_path: Path) -> None:
    trainer = mixture(tmp_path)
    seen: list[Routing] = []
    layer, router = next(iter(iter_routers(trainer)))
    router.register_forward_hook(lambda _router, _inputs, routing: seen.append(routing))
    trainer.forward_backward(0)
    routing = seen[0]
    gathered = routing.probabilities.gather(-1, routing.experts)
    if routing.experts.shape[-1] > 1:
        gathered = gathered / gathered.sum(-1, keepdim=True)
    assert torch.equal(routing.gates, gathered), layer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_gathers_choices_of_all_ranks_by_position(tmp_path: Path, method: str) -> None:
    """In fp32, choices of the reference are equal, so a misplaced choice shows."""
    write_data(tmp_path)
    layout = {"cp": 2, "pp": 2, "cp_method": method}
    spec = make_spec("moe", layout, 4, train={"steps": 4, "data": "parity.bin"})
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    done = run_ranks(4, "workers.trainer.__main__", "--spec", str(path), "--data-root", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    pattern = r"the reference used the expert choices of the run for (\d+) tokens of all layers, which (.*?);"
    tokens = spec.model.num_layers * spec.train.global_batch * spec.train.seq_len
    assert set(re.findall(pattern, done.stdout)) == {(str(tokens), "equal its own choices")}, done.stdout[-3000:]
