"""One process takes a run's choices of experts, and tells rounding from a router that chooses wrong."""

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
from tests.support.ranks import forked
from workers.meter import Recorder
from workers.trainer.errors import ProofError
from workers.trainer.model.moe import Routing, routed
from workers.trainer.trainer import Trainer, train
from workers.trainer.verification import Proof
from workers.trainer.verification.routing import Chosen, routers


def mixture(folder: Path, **asked: Any) -> Trainer:
    write_data(folder)
    spec = make_spec("moe", {"recompute": "full"}, 2, train={"steps": 4, **asked})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": 2})})
    return make_trainer(spec, folder, Recorder(0))


def proven(trainer: Trainer) -> list[ProofItem]:
    said: list[ProofItem] = []
    items: Any = lambda item: said.append(item) if item["kind"] == "proof" else None  # noqa: E731
    train(trainer, items, lambda _line: None, watch=Proof(trainer, items, lambda _line: None))
    return said


def wrongly(trainer: Trainer, tokens: int) -> None:
    """Some tokens of the last layer go to the expert that is the least probable, with its gate."""

    def route(_router: Any, _inputs: Any, routing: Routing) -> Routing:
        experts = routing.experts.clone()
        experts.flatten(0, 1)[:tokens, -1] = routing.probabilities.flatten(0, 1)[:tokens].argmin(-1)
        gates = routing.probabilities.gather(-1, experts)
        return routed(experts, gates, routing.probabilities, routing.gates.dtype)

    list(routers(trainer))[-1][1].register_forward_hook(route)


def test_what_rounding_turned_is_followed_and_told(tmp_path: Path) -> None:
    """Of so few rows one turned choice was as much as a fault: 0.53 of a gradient, by a limit of 0.3."""
    last = proven(mixture(tmp_path, precision="bf16", seq_len=16))[-1]
    one, end = last["one_process"], last["end"]
    assert (one["state"], end["state"]) == ("equal", "equal")
    assert one["choices"]["tokens"] == end["choices"]["tokens"] == 2 * 8 * 16, "layers x tokens"
    assert max(one["gradient"], end["gradient"]) < 0.1


def test_in_fp32_no_choice_is_turned_and_a_mixture_is_equal_as_others_are(tmp_path: Path) -> None:
    one = proven(mixture(tmp_path))[-1]["one_process"]
    assert one["choices"]["turned"] == 0
    assert one["gradient"] < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_token_that_a_router_sends_to_the_wrong_expert_is_told(tmp_path: Path, precision: str) -> None:
    trainer = mixture(tmp_path, precision=precision)
    wrongly(trainer, 1)
    with pytest.raises(ProofError, match=r"choice of layers\.\d+\.moe\.router differs from the reference by"):
        proven(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_token_that_has_its_best_expert_twice_is_told(tmp_path: Path, precision: str) -> None:
    """The least probable of its gates is more than it would have been: it looked like the better choice."""
    trainer = mixture(tmp_path, precision=precision)

    def route(_router: Any, _inputs: Any, routing: Routing) -> Routing:
        experts = routing.experts.clone()
        experts.flatten(0, 1)[0, -1] = experts.flatten(0, 1)[0, 0]
        gates = routing.probabilities.gather(-1, experts)
        return routed(experts, gates, routing.probabilities, routing.gates.dtype)

    list(routers(trainer))[-1][1].register_forward_hook(route)
    with pytest.raises(ProofError, match=r"choice of layers\.\d+\.moe\.router differs from the reference with NaN"):
        proven(trainer)


def test_choices_of_a_step_are_kept_for_each_micro_batch_and_given_up_after(tmp_path: Path) -> None:
    trainer = mixture(tmp_path, micro_batches=2)
    chosen = Chosen(trainer, on=True)
    trainer.backward(0)
    chosen.end_step()
    assert chosen.num_bytes > 0
    (step,) = chosen.take()
    assert chosen.num_bytes == 0
    spec = trainer.spec
    for experts in step.values():
        assert experts.shape[:2] == (spec.train.global_batch, spec.train.seq_len)
        assert int(experts.min()) >= 0, "none is missing"
    trainer.backward(1)
    chosen.end_step()
    assert chosen.num_bytes == 0, "it is off until it is asked again"


def test_limits_of_a_mixture_are_those_of_any_model_and_name_its_choices() -> None:
    for precision in ("fp32", "bf16", "fp8"):
        mixed, plain = (make_spec(model, {}, 2, train={"precision": precision}) for model in ("moe", "llama"))
        assert get_tolerances(mixed) == get_tolerances(plain)
        assert f", {get_tolerances(mixed).router_choice:g} in router choices" in format_tolerances(
            mixed, get_tolerances(mixed), trained=False
        )


def test_a_followed_step_has_the_gates_of_the_run_s_own(tmp_path: Path) -> None:
    trainer = mixture(tmp_path)
    seen: list[Routing] = []
    layer, router = next(iter(routers(trainer)))
    router.register_forward_hook(lambda _router, _inputs, routing: seen.append(routing))
    trainer.backward(0)
    routing = seen[0]
    gathered = routing.probabilities.gather(-1, routing.experts)
    if routing.experts.shape[-1] > 1:
        gathered = gathered / gathered.sum(-1, keepdim=True)
    assert torch.equal(routing.gates, gathered), layer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_choices_of_all_ranks_are_put_together_by_micro_batch_and_position(tmp_path: Path, method: str) -> None:
    """In fp32 one process' own are the same: any that is not where it was made would be another's."""
    write_data(tmp_path)
    layout = {"cp": 2, "pp": 2, "cp_method": method}
    spec = make_spec("moe", layout, 4, train={"steps": 4, "data": "parity.bin"})
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    done = forked(4, "workers.trainer.__main__", "--spec", str(path), "--data-root", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"routers chose for (\d+) tokens of all layers, (.*?);", done.stdout)
    tokens = spec.model.num_layers * spec.train.global_batch * spec.train.seq_len
    assert set(told) == {(str(tokens), "all as its own")}, done.stdout[-3000:]
