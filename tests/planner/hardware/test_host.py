"""Host launch time: how far the host runs ahead inside a chunk's forward or backward."""

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


def _measure_host_wait(vocab: int, stage: int = 3, *, chunks: int = 1, launches: int = 0) -> float:
    """Return the seconds per micro-batch that a stage of 4 waits for its host."""
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


def _measure_launch_wait(precision: str = "bf16", **changed: object) -> float:
    """Return the host wait of stage 1 of 4 per micro-batch, with the given stack constants."""
    train = TrainSpec.model_validate({"global_batch": 32, "micro_batches": 4, "seq_len": 1024, "precision": precision})
    layout = Layout(pp=4, dp=2, recompute="none")
    spec = JobSpec(model=SMALL, layout=layout, train=train, resources=Resources(device="cuda", stack="megatron"))
    compute = ComputeTimer(H100, Stacks({"megatron": STACKS["megatron"]._replace(**changed)}, 8), None)
    return compute.time_stage(resolve(spec), 1, 8).launch_s


def test_head_kernels_leave_the_host_time_to_launch_layers() -> None:
    """Compare 50,304 logits with the stage before, which has an equal number of layers, and with a small head."""
    assert 0 < _measure_host_wait(50_304) < 0.8 * _measure_host_wait(50_304, stage=2)
    assert _measure_host_wait(50_304) < _measure_host_wait(512)


def test_head_saves_host_time_only_in_its_own_chunk() -> None:
    """The head shortens the wait in one of 3 chunks of one layer. Other chunks wait like the stage before."""
    before = _measure_host_wait(50_304, stage=2, chunks=3)
    assert _measure_host_wait(50_304, chunks=3) == pytest.approx(2 / 3 * before)


@pytest.mark.parametrize(("precision", "products"), [("fp8", 4), ("bf16", 0)])
def test_fp8_matmul_adds_host_time(precision: str, products: int) -> None:
    """Each of the four matmuls of a layer adds its time once in forward and twice in backward."""
    waited = [_measure_launch_wait(precision=precision, cast_s=seconds) for seconds in (1e-3, 2e-3)]
    assert waited[1] - waited[0] == pytest.approx(3 * products * 3 * 1e-3)


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_chunk_turn_launches_a_send_and_a_receive(chunks: int) -> None:
    """Launches count in forward and in backward if the stage waits for its host."""
    more = _measure_host_wait(512, stage=1, chunks=chunks, launches=3) - _measure_host_wait(512, stage=1, chunks=chunks)
    assert more == pytest.approx(2 * chunks * 3 * STACKS["megatron"].launch_s)
