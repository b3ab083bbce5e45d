"""What a stage waits for its host: as far ahead as a chunk's forward or backward goes, and no further."""

from __future__ import annotations

import pytest

from planner.cost.compute import ComputeTimer
from planner.cost.resolved_plan import resolve
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import STACKS

H100 = CLUSTERS["h100"].accelerator
SMALL = PRESETS["gpt-tiny"].model.model_copy(
    update={"preset": None, "num_layers": 12, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    | {"ffn_hidden_size": 2048, "max_seq_len": 1024}
)


def _waited(vocab: int, stage: int = 3, *, chunks: int = 1, launches: int = 0) -> float:
    """Seconds of one micro-batch that a stage of 4 waits for its host."""
    layout = Layout(
        pp=4, dp=2, virtual_stages=chunks, schedule="interleaved_1f1b" if chunks > 1 else "1f1b", recompute="none"
    )
    spec = JobSpec(
        model=SMALL.model_copy(update={"vocab_size": vocab}),
        layout=layout,
        train=TrainSpec(global_batch=32, micro_batches=4, seq_len=1024, precision="bf16"),
        resources=Resources(device="cuda", stack="megatron"),
    )
    stack = STACKS["megatron"]._replace(chunk_launches=launches)
    return ComputeTimer(H100, Stacks({"megatron": stack}, 8), None).time_stage(resolve(spec), stage, 8).launch_s


def _launches(precision: str = "bf16", **changed: object) -> float:
    """Seconds that the second of 4 stages waits for its host in one micro-batch, with these constants of its stack."""
    train = TrainSpec.model_validate({"global_batch": 32, "micro_batches": 4, "seq_len": 1024, "precision": precision})
    layout = Layout(pp=4, dp=2, recompute="none")
    spec = JobSpec(model=SMALL, layout=layout, train=train, resources=Resources(device="cuda", stack="megatron"))
    compute = ComputeTimer(H100, Stacks({"megatron": STACKS["megatron"]._replace(**changed)}, 8), None)
    return compute.time_stage(resolve(spec), 1, 8).launch_s


def test_a_heads_passes_leave_the_host_time_for_layers() -> None:
    """Of 50,304 logits, beside as many layers on the stage before and beside a small head."""
    assert 0 < _waited(50_304) < 0.8 * _waited(50_304, stage=2)
    assert _waited(50_304) < _waited(512)


def test_but_only_for_those_of_its_chunk() -> None:
    """With 3 chunks of a layer the head has one to leave time for: the others wait as on the stage before."""
    before = _waited(50_304, stage=2, chunks=3)
    assert _waited(50_304, chunks=3) == pytest.approx(2 / 3 * before)


@pytest.mark.parametrize(("precision", "products"), [("fp8", 4), ("bf16", 0)])
def test_a_product_in_fp8_may_take_its_host_longer(precision: str, products: int) -> None:
    """Each of a layer's four, in forward and twice in backward, where the host is what is waited for."""
    waited = [_launches(precision=precision, cast_s=seconds) for seconds in (1e-3, 2e-3)]
    assert waited[1] - waited[0] == pytest.approx(3 * products * 3 * 1e-3)


def test_so_may_what_is_no_kernel_of_a_layer() -> None:
    more = _launches(layer_s=(2e-3, 3e-3)) - _launches(layer_s=(1e-3, 1e-3))
    assert more == pytest.approx(3 * (1e-3 + 2e-3)), "3 layers a stage"


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_turn_of_a_chunk_is_received_and_sent(chunks: int) -> None:
    """In forward and in backward, where the host is what is waited for."""
    more = _waited(512, stage=1, chunks=chunks, launches=3) - _waited(512, stage=1, chunks=chunks)
    assert more == pytest.approx(2 * chunks * 3 * STACKS["megatron"].launch_s)
