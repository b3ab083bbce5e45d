"""Verification of a run: checksums, replicas, and the single-process reference."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from contracts.telemetry.results import Mismatch, ProofItem, ReferenceProof
from planner.facts.parse_spec import parse_spec
from planner.facts.single_process_reference import (
    BF16_TOLERANCES,
    COMPARED_STEPS,
    FP8_TOLERANCES,
    SPLIT_MATMUL_TOLERANCES,
    WHOLE_MATMUL_TOLERANCES,
    Tolerances,
    explain_no_reference,
    format_tolerances,
    get_tolerances,
    make_reference_spec,
    needs_fp32_reference,
)
from planner.facts.spec import JobSpec, Layout
from planner.facts.validation import SpecError
from tests.parity.cases import make_spec, write_data
from tests.parity.rank import make_trainer
from tests.support.ranks import run_ranks
from workers.meter import Recorder
from workers.trainer.errors import VerificationError
from workers.trainer.memory import PeakMemory
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import RunHooks, Trainer
from workers.trainer.verification import RunVerifier, verifier
from workers.trainer.verification.comparison import format_failure, format_reference
from workers.trainer.verification.reference import compute_reference
from workers.trainer.verification.replicas import BLOCK, ReplicaComparison, checksum, compare_replicas, list_shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_detects_every_bit_and_swap(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 50, dtype=torch.float64).to(dtype)
    before = checksum(tensor)
    words = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in range(0, tensor.numel(), 7):
        for bit in range(8 * tensor.element_size() - 1):
            words.view(-1)[place] ^= 1 << bit
            assert checksum(tensor) != before
            words.view(-1)[place] ^= 1 << bit
    assert checksum(tensor) == before
    swapped = tensor.flatten()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksum(swapped) != before


def test_a_checksum_depends_on_the_position() -> None:
    first, second = torch.zeros(3 * BLOCK), torch.zeros(3 * BLOCK)
    first[5], second[BLOCK + 5] = 1.0, 1.0
    assert checksum(first) != checksum(second)
    assert checksum(torch.full((4,), torch.nan)) == checksum(torch.full((4,), torch.nan)), "bits are compared"


def test_detects_weights_that_differ_from_their_masters(tmp_path: Path) -> None:
    write_data(tmp_path)
    spec = make_spec("llama", {}, 2, train={"precision": "bf16"})
    mesh = build_mesh(spec, 0, lambda _group, _axis: None)
    parts = [make_trainer(spec, tmp_path, Recorder(0)).model for _ in range(2)]
    pieces = [piece for part in parts for piece in list_shards(spec, mesh.coordinates, part)]

    def compared() -> ReplicaComparison:
        return compare_replicas("weight", spec, mesh, pieces, lambda piece: piece.weight, BF16_TOLERANCES.replicas)

    assert compared().wrong == []
    with torch.no_grad():
        parts[1].parameters[3].weight.view(-1)[:8] = 123.0
    (wrong,) = compared().wrong
    assert wrong["name"] == parts[1].parameters[3].name
    assert wrong["apart"] is not None
    assert wrong["apart"] > 1
    with torch.no_grad():
        parts[1].parameters[3].weight.view(-1)[:8] = math.nan
    (wrong,) = compared().wrong
    assert wrong["apart"] is None, "the masters are 0.0 apart, and no number is not"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_state", "fp8"])
def test_detects_a_missed_warmup_update(tmp_path: Path, precision: str) -> None:
    """The difference is 3e-6 of weights of 0.02, or one bit of bf16."""
    write_data(tmp_path)
    spec = make_spec("llama", {}, 2, train={"precision": precision, "learning_rate": 1e-3})
    mesh = build_mesh(spec, 0, lambda _group, _axis: None)
    parts = [make_trainer(spec, tmp_path, Recorder(0)).model for _ in range(2)]
    pieces = [piece for part in parts for piece in list_shards(spec, mesh.coordinates, part)]
    missed = next(piece for piece in list_shards(spec, mesh.coordinates, parts[1]) if piece.name.endswith("q.weight"))
    most = get_tolerances(spec).replicas
    assert compare_replicas("weight", spec, mesh, pieces, lambda piece: piece.weight, most).wrong == []
    with torch.no_grad():
        missed.weight.mul_(1 + (1.5e-4 if missed.weight.dtype == torch.float32 else 2**-7))
    (wrong,) = compare_replicas("weight", spec, mesh, pieces, lambda piece: piece.weight, most).wrong
    assert wrong["name"] == missed.name


def test_gradients_that_are_rounding_are_scaled_by_the_others(tmp_path: Path) -> None:
    trainer = one_rank(tmp_path, seq_len=1)
    found = compute_reference(trainer.spec, trainer.dataset, trainer.device, 1).tensors
    gone = {name.split(".", 2)[2] for name, expected in found.items() if math.isinf(expected.update_rms)}
    assert gone == {"attention.q.weight", "attention.k.weight"}


def one_rank(folder: Path, **train: Any) -> Trainer:
    write_data(folder)
    spec = make_spec("llama", {"recompute": "full"}, 2, train={"steps": 4, **train})
    return make_trainer(spec, folder, Recorder(0))


def proven(trainer: Trainer) -> list[ProofItem]:
    messages: list[ProofItem] = []
    items: Any = lambda item: messages.append(item) if item["kind"] == "proof" else None  # noqa: E731
    trainer.train(RunHooks(items, lambda _line: None, verifier=RunVerifier(trainer, items, lambda _line: None)))
    return messages


def test_verifies_after_the_first_steps_and_at_the_end(tmp_path: Path) -> None:
    first, compared, last, end = proven(one_rank(tmp_path))
    assert first["one_process"]["state"] == "due"
    assert compared["one_process"]["state"] == last["one_process"]["state"] == "equal"
    assert [item["replicas"]["steps"] for item in (first, compared, last)] == [[1], [1], [1, 4]]
    assert (last["end"]["state"], last["end"]["steps"]) == ("due", 4)
    assert (end["end"]["state"], end["end"]["steps"]) == ("equal", 1)
    assert end["end"]["gradient"] < 1e-5
    assert end["wrong"] == last["wrong"] == []


def test_a_later_fault_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path)
    backward = trainer.forward_backward

    def forgets(index: int) -> None:
        backward(index)
        if index >= COMPARED_STEPS:
            trainer.model.parameters[5].gradient.mul_(1.01)

    monkeypatch.setattr(trainer, "forward_backward", forgets)
    with pytest.raises(
        VerificationError, match=rf"gradient of {trainer.model.parameters[5].name} differs from the reference by"
    ):
        proven(trainer)


def test_detects_a_wrong_learning_rate_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path, warmup_steps=0)
    monkeypatch.setattr(trainer, "update_weights", partial(_update_at_full_rate, trainer))
    with pytest.raises(VerificationError, match=r"update of .* differs from the reference by 9.0e\+00"):
        proven(trainer)


def _update_at_full_rate(trainer: Trainer, index: int) -> None:
    Trainer.update_weights(trainer, index if index < COMPARED_STEPS else 0)


def test_compares_the_validation_loss_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path, eval_every=2)
    evaluate = trainer.evaluate

    def halved() -> float:
        trainer.last_eval_loss = evaluate() / 2
        return trainer.last_eval_loss

    monkeypatch.setattr(trainer, "evaluate", halved)
    with pytest.raises(
        VerificationError, match=r"loss of validation after step 4 differs from the reference by 5.0e-01"
    ):
        proven(trainer)


def test_detects_wrong_rows_without_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path, verify="off")
    backward = trainer.forward_backward
    monkeypatch.setattr(trainer, "forward_backward", lambda index: backward(index + 1))
    with pytest.raises(VerificationError, match="100% of the rows of step 1 on rank 0 differ from the data on rank 0"):
        proven(trainer)


class Noted:
    """Record the retained bytes in place of a peak."""

    def __init__(self) -> None:
        self.max_bytes, self.kept = 0, list[int]()

    def read(self) -> int:
        return 0

    def restart(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self, kept: int) -> None:
        self.kept.append(kept)


def test_reports_the_retained_bytes_of_the_first_step(tmp_path: Path) -> None:
    """Gradients and weights of the first step are retained until the comparison."""
    trainer, noted = one_rank(tmp_path), Noted()
    size = sum(held.weight.numel() * 4 for held in trainer.model.parameters)
    quiet: Any = lambda _item: None  # noqa: E731
    trainer.train(RunHooks(quiet, quiet, verifier=RunVerifier(trainer, quiet, quiet), peak=cast(PeakMemory, noted)))
    assert noted.kept == [size, *[2 * size] * 4, 0, 0, 0], "it looks into four steps, twice each"


def test_doubled_gradients_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path, grad_clip=0.0)
    backward = trainer.forward_backward

    def doubled(index: int) -> None:
        backward(index)
        for held in trainer.model.parameters:
            if held.name == "layers.2.mlp.up.weight":
                held.gradient.mul_(1 + 2e-5)

    monkeypatch.setattr(trainer, "forward_backward", doubled)
    with pytest.raises(
        VerificationError, match=r"gradient of layers.2.mlp.up.weight differs from the reference by 2.0e-05"
    ):
        proven(trainer)


def test_a_missing_update_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_rank(tmp_path)
    name = next(h.name for h in trainer.model.parameters if h.master is trainer.optimizer.param_groups[0]["params"][3])
    trainer.optimizer.param_groups[0]["params"].pop(3)
    with pytest.raises(VerificationError, match=rf"update of {name} differs from the reference by 1.0e\+00"):
        proven(trainer)


def test_results_that_are_not_finite_are_not_compared(tmp_path: Path) -> None:
    wild = {"learning_rate": 10.0, "weight_decay": 10.0, "grad_clip": 0.0, "warmup_steps": 0, "steps": 6}
    trainer = one_rank(tmp_path, **wild, on_not_finite="continue")
    trainer.model.parameters[0].weight.data.fill_(float("inf"))
    last = proven(trainer)[-1]["one_process"]
    assert last["state"] == "not checked"
    assert "is nan at step 1" in last["why"]


def test_steps_after_divergence_are_not_compared(tmp_path: Path) -> None:
    wild = {"learning_rate": 3.0, "weight_decay": 0.0, "grad_clip": 0.0, "warmup_steps": 0}
    one = proven(one_rank(tmp_path, **wild))[-1]["one_process"]
    assert (one["state"], one["steps"]) == ("equal", 1)
    assert "step 2 and later are not compared: the reference loss grew from " in one["why"]
    assert "losses of 1 step " in format_reference(one)


def test_later_norms_are_not_compared_in_16_bits(tmp_path: Path) -> None:
    """In healthy runs, later norms differ by 0.1 to 1.7."""
    wild = {"precision": "bf16", "learning_rate": 0.01, "warmup_steps": 0, "grad_clip": 0.1, "steps": 3, "seq_len": 16}
    one = proven(one_rank(tmp_path, **wild))[-1]["one_process"]
    assert (one["state"], one["steps"]) == ("equal", 3)
    assert "0.001 in the first gradient norm" in one["why"]


def test_updates_from_rounding_are_not_compared(tmp_path: Path) -> None:
    """In bf16, two of 16 elements of a bias had a wrong sign."""
    last = proven(one_rank(tmp_path, precision="bf16", grad_clip=0.0))[-1]
    assert last["one_process"]["state"] == last["end"]["state"] == "equal"
    assert last["one_process"]["update"] < 0.05


def test_a_run_succeeds_without_memory_for_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_asked: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("workers.trainer.verification.verifier.allocate_moments", full)
    last = proven(one_rank(tmp_path))[-1]
    assert last["one_process"]["state"] == "equal"
    assert (last["end"]["state"], last["wrong"]) == ("not checked", [])
    assert last["end"]["why"] == "Single-process reference unavailable: out of memory"


def test_a_16_bit_run_has_a_16_bit_reference_at_the_end(tmp_path: Path) -> None:
    """Gradients almost cancel after training, and differ by 0.12 to 1.2 from fp32."""
    last = proven(one_rank(tmp_path, precision="bf16", steps=10, seed=3, learning_rate=0.003))[-1]
    assert last["one_process"]["gradient"] == 0.0, "one rank computes as one process does"
    assert (last["end"]["state"], last["end"]["gradient"]) == ("equal", 0.0)


def test_a_bf16_run_is_also_compared_with_an_fp32_reference(tmp_path: Path) -> None:
    (found,) = re.findall(
        r"differences from an fp32 reference: (\S+) in gradients, (\S+) in updates",
        proven(one_rank(tmp_path, precision="bf16"))[-1]["one_process"]["why"],
    )
    gradient, update = map(float, found)
    assert 1e-3 < gradient < 0.1
    assert 0 < update < 0.4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["learning rate", "weight decay of norms", "micro-batch", "rounded gradients"])
def test_faults_of_the_update_are_detected_in_both_precisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, fault: str
) -> None:
    """Rounding faults that run and reference share differ from the fp32 reference."""
    trainer = one_rank(tmp_path, precision=precision, warmup_steps=0)
    backward = trainer.forward_backward

    def change(index: int) -> None:
        backward(index)
        for held in trainer.model.parameters:
            if fault == "micro-batch":
                held.gradient.mul_(1.05)
            elif fault == "rounded gradients":
                held.gradient.copy_(held.gradient.to(torch.float8_e5m2).float())

    step = trainer.optimizer.step

    def update(*given: Any, **named: Any) -> Any:
        for group in trainer.optimizer.param_groups:
            if fault == "learning rate":
                group["lr"] *= 0.7
            elif fault == "weight decay of norms":
                group["weight_decay"] = 0.1
        return step(*given, **named)

    monkeypatch.setattr(trainer, "forward_backward", change)
    monkeypatch.setattr(trainer.optimizer, "step", update)
    with pytest.raises(VerificationError, match="differs from the reference"):
        proven(trainer)


def test_a_fault_that_the_bf16_reference_shares_differs_from_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary angles in bf16 change the run and the reference in its precision alike."""
    trainer = one_rank(tmp_path, precision="bf16")
    compute = verifier.compute_reference

    def same_fault(*given: Any, precision: str | None = None, **named: Any) -> Any:
        found = compute(*given, precision=precision, **named)
        if precision != "fp32":
            return found
        name = "layers.2.mlp.up.weight"
        found.tensors[name] = found.tensors[name]._replace(gradient=found.tensors[name].gradient * 1.5)
        return found

    monkeypatch.setattr(verifier, "compute_reference", same_fault)
    with pytest.raises(VerificationError, match=r"gradient of layers\.2\.mlp\.up\.weight in fp32 differs"):
        proven(trainer)


@pytest.mark.parametrize(
    ("precision", "batches", "fails"), [("fp8", 2, False), ("fp8", 3, True), ("bf16", 1, True), ("fp32", 1, True)]
)
def test_one_extra_batch_must_be_within_limits_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, batches: int, fails: bool
) -> None:
    """In fp8, 1 of 19 batches of a healthy run exceeded the limits."""
    trainer = one_rank(tmp_path, precision=precision)
    backward, name = trainer.forward_backward, "layers.2.mlp.up.weight"
    held = next(held for held in trainer.model.parameters if held.name == name)

    def rounds(index: int) -> None:
        backward(index)
        if 4 <= index < 4 + batches:
            held.gradient.mul_(50)

    monkeypatch.setattr(trainer, "forward_backward", rounds)
    if fails:
        with pytest.raises(VerificationError, match=f"gradient of {name} differs from the reference"):
            proven(trainer)
        return
    last = proven(trainer)[-1]
    assert (last["end"]["state"], last["end"]["gradient"], last["wrong"]) == ("equal", 0.0, [])
    assert f"because in step 6 gradient of {name} differs from the reference by " in last["end"]["why"]


def test_the_summary_names_its_figures_and_limits(tmp_path: Path) -> None:
    limit = proven(one_rank(tmp_path))[0]["one_process"]["limit"]
    figures = {"steps": 3, "tensors": 60, "update": 2e-4, "loss": 2e-7, "norm": 7e-7, "seconds": 0.3}
    equal = ReferenceProof(state="equal", why="rounding allows ...", gradient=6e-7, limit=limit, **figures)  # type: ignore[typeddict-item]
    result = format_reference(equal)
    assert result.startswith(
        "gradients, updates, and norms match the single-process reference to 2e-04 (largest differences: gradients of "
        "60 tensors 6e-07, updates 2e-04"
    )
    assert result.endswith("; rounding allows ...)")
    rounded = format_reference({**equal, "gradient": 0.059, "limit": 0.1})
    assert rounded.startswith("gradients, updates, and norms match the single-process reference to 6e-02 (")
    bf16 = make_spec("llama", {"tp": 2}, 2, train={"precision": "bf16"})
    assert format_tolerances(bf16, BF16_TOLERANCES, "fp32") == (
        "bf16 allows relative differences from a fp32 single-process reference of 0.1 in gradients (0.2 in vectors), "
        "0.4 in updates, 0.005 in losses plus 0.3 of the loss change, 0.05 in the first gradient norm"
    )
    assert format_tolerances(bf16, get_tolerances(bf16), "bf16").startswith(
        "bf16 allows relative differences from a bf16 single-process reference of 0.05 in gradients (0.1 in vectors), "
        "0.02 in updates"
    )
    fp8 = make_spec("llama", {}, 2, train={"precision": "fp8"})
    result = format_tolerances(fp8, get_tolerances(fp8), "fp8")
    assert "of 0.3 in gradients (0.5 in vectors), 0.5 in updates" in result


@pytest.mark.parametrize(
    ("layout", "precision", "tolerances"),
    [
        ({"dp": 2, "zero": 3}, "bf16", WHOLE_MATMUL_TOLERANCES),
        ({"pp": 2}, "bf16", WHOLE_MATMUL_TOLERANCES),
        ({"tp": 2}, "bf16", SPLIT_MATMUL_TOLERANCES),
        ({"cp": 2}, "bf16", SPLIT_MATMUL_TOLERANCES),
        ({"dp": 2}, "bf16_gradients", BF16_TOLERANCES),
        ({"dp": 2}, "fp8", FP8_TOLERANCES),
    ],
)
def test_tolerances_depend_on_the_sums_that_the_layout_changes(
    layout: dict[str, Any], precision: str, tolerances: Tolerances
) -> None:
    assert get_tolerances(make_spec("llama", layout, 2, train={"precision": precision})) == tolerances


def test_tied_embeddings_of_two_stages_sum_gradients_in_another_precision() -> None:
    tied = make_spec("gpt", {"pp": 2}, 2, train={"precision": "bf16"})
    assert get_tolerances(tied) == SPLIT_MATMUL_TOLERANCES


def test_only_bf16_with_master_weights_has_an_fp32_reference() -> None:
    for precision, needed in (("fp32", False), ("bf16", True), ("bf16_state", False), ("fp8", False)):
        spec = make_spec("llama", {"dp": 2}, 2, train={"precision": precision})
        assert needs_fp32_reference(spec) is needed
        assert make_reference_spec(spec).train.precision == precision
        assert make_reference_spec(spec, "fp32").train.precision == "fp32"


def test_small_models_are_verified_by_default() -> None:
    def asked(preset: str, device: str = "cpu", **train: object) -> JobSpec:
        return parse_spec({"model": {"preset": preset}, "train": train, "resources": {"device": device}})

    large = partial(asked, "nanogpt", seq_len=256)
    assert explain_no_reference(asked("gpt-tiny")) == ""
    assert explain_no_reference(asked("gpt-tiny", verify="off")) == "`train.verify` is off"
    assert "parameters = 3.0 GB. The limit with `train.verify` auto is 32,000,000 parameters." in explain_no_reference(
        asked("gpt2")
    )
    assert "about 11 s for 3 steps. The limit with `train.verify` auto is 5 s." in explain_no_reference(large())
    assert explain_no_reference(large(verify="on")) == ""
    with pytest.raises(SpecError, match=r"24 B x 6,738,415,616 parameters = 161.7 GB"):
        asked("llama2-7b", verify="on")
    with pytest.raises(
        SpecError,
        match=r"`train.verify` is on, but .* about 351 s for 3 steps. The limit with `train.verify` on is 300 s",
    ):
        large(verify="on", global_batch=256)
    assert explain_no_reference(large(device="cuda")) == "", "a GPU takes less"


def test_the_reference_has_the_same_micro_batch_size() -> None:
    spec = make_spec("gpt", {"dp": 2, "tp": 2}, 2, train={"precision": "bf16", "checkpoint_every": 2})
    one = make_reference_spec(spec)
    assert one.layout == Layout()
    assert one.micro_batch_size == spec.micro_batch_size == 2
    assert (one.train.precision, one.train.checkpoint_every, one.train.seed) == ("bf16", 0, spec.train.seed)
    assert one.model == spec.model


def test_the_worst_mismatch_is_first() -> None:
    copy = Mismatch(what="weight", name="head.weight", axis="tp", ranks=[1, 0], apart=1e-3, limit=1e-6)
    lost = Mismatch(what="gradient", name="layers.0.mlp.up.weight", axis="", ranks=[2], apart=None, limit=1e-5)
    others = [Mismatch(what="loss", name=f"step {i}", axis="", ranks=[0], apart=2e-4, limit=1e-4) for i in (1, 2, 3)]
    assert format_failure([*others, copy, lost]).split("; ") == [
        "verification failed: gradient of layers.0.mlp.up.weight differs from the reference with NaN or infinite "
        "values on rank 2 (limit 1e-05)",
        "weight of head.weight on rank 1 differs from rank 0 (over tp) by 1.0e-03 (limit 1e-06)",
        "loss of step 1 differs from the reference by 2.0e-04 (limit 1e-04)",
        "and 2 more",
    ]


@pytest.mark.parametrize(
    ("rate", "result"),
    [
        pytest.param(5e-3, "extra final step matches the reference to ", id="a loss of 1e-4"),
        pytest.param(3e-2, "extra final step not compared: step 61 is not compared: the loss ", id="of 1e-6"),
    ],
)
def test_memorized_data_does_not_fail_the_verification(tmp_path: Path, rate: float, result: str) -> None:
    """Gradients of queries are 5e-9 of the other gradients."""
    np.full(5_000, 7, np.uint16).tofile(tmp_path / "heart.bin")
    train = {"steps": 60, "eval_every": 0, "data": "heart.bin", "learning_rate": rate}
    path = tmp_path / "spec.json"
    path.write_text(make_spec("llama", {"tp": 2}, 2, train=train).model_dump_json())
    done = run_ranks(2, "workers.trainer.__main__", "--spec", str(path), "--data-root", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert result in done.stdout, done.stdout[-3000:]
