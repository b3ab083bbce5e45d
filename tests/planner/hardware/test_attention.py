"""Time of fused attention by row length, heads, window and accelerator."""

from __future__ import annotations

import pytest

from planner.cost.timing import Timer
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources, StackName
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.hardware.catalog import ACCELERATORS, CLUSTERS
from planner.hardware.kernel_time import CUDNN_BLACKWELL, CUDNN_HOPPER, NARROW_ROW_FACTOR, AttentionRates
from planner.hardware.kernels import FlashAttention, MemoryKernel, build_layer_kernels
from planner.hardware.stacks import STACKS

TRAIN = TrainSpec(global_batch=256, micro_batches=4, seq_len=4096, precision="fp8")
SPEC = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=64, zero=1),
    train=TRAIN,
    resources=Resources(device="cuda", stack="megatron"),
)


def _flash(spec: JobSpec = SPEC, window: int | None = None) -> FlashAttention:
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"sliding_window": window})})
    (found,) = (k for k in build_layer_kernels(spec).forward if isinstance(k, FlashAttention))
    return found


def _compute_s(name: str, seq_len: int, **changed: object) -> float:
    spec = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"seq_len": seq_len})})
    return Timer(CLUSTERS[name], {"megatron": STACKS["megatron"]._replace(**changed)}).get_step(spec).compute_s


@pytest.mark.parametrize(
    ("name", "law"), [("h100", {"attention_hopper": CUDNN_HOPPER}), ("gb200", {"attention_blackwell": CUDNN_BLACKWELL})]
)
def test_attention_time_grows_with_row_length(name: str, law: dict[str, AttentionRates]) -> None:
    """Only the number of tokens counts. The law of another accelerator generation changes nothing."""
    (field, usual), other = *law.items(), {"h100": "gb200", "gb200": "h100"}[name]
    bare = {field: usual._replace(extra_tokens=0)}
    extra = [_compute_s(name, seq) - _compute_s(name, seq, **bare) for seq in (4096, 8192)]
    assert extra[0] > 0
    assert extra[1] == pytest.approx(2 * extra[0], rel=2e-2)
    assert _compute_s(other, 4096) == _compute_s(other, 4096, **bare)


@pytest.mark.parametrize(
    ("width", "looks_back", "length", "measured_ms"),
    [
        (128, 0, 2048, 0.257),
        (192, 0, 4096, 1.090 * 192 / 160),
        (192, 0, 8192, 3.864 * 192 / 160),
        (128, 0, 8192, 2.762),
        (64, 128, 4096, 0.169),
        (64, 128, 8192, 0.331),
        (64, 1024, 2048, 0.167),
        (64, 1024, 4096, 0.348),
        (64, 1024, 8192, 0.710),
    ],
)
def test_blackwell_law_matches_cudnn_runs_on_gb200(
    width: int, looks_back: int, length: int, measured_ms: float
) -> None:
    """Start from a measured run: 64 heads of size 128, rows of 4,096, forward and backward, 0.7945 ms.

    Keys of 192 have values of 128.
    """

    def compute_relative_time(width: int, looks_back: int, length: int) -> float:
        share = looks_back / length * (2 - looks_back / length) if looks_back else 1.0
        flash = FlashAttention(0, 0, share * length, width)
        return share * length**2 * width * CUDNN_BLACKWELL.compute_slowdown(flash)

    told = 0.7945 * compute_relative_time(width, looks_back, length) / compute_relative_time(128, 0, 4096)
    assert told == pytest.approx(measured_ms, rel=0.07)


def test_longest_rows_reach_the_published_share_of_peak() -> None:
    """Use four published runs that are mostly attention: 16,384 to 1,048,576 tokens on H100 and B200."""
    laws = {"H100 SXM": CUDNN_HOPPER, "GB200": CUDNN_BLACKWELL}
    reached = [ACCELERATORS[name].attention_efficiency * law.peak_factor for name, law in laws.items()]
    assert reached == pytest.approx([0.53, 0.55], abs=5e-3)


def test_grouped_queries_are_copied_and_their_gradients_joined() -> None:
    """Expect 6,144 columns per token, read and written in 16 bits, for 32 query heads and 8 key heads."""
    plain, copied = (
        build_layer_kernels(SPEC, fused_projections=True, copies_queries=copies) for copies in (False, True)
    )
    token = 4 * SPEC.micro_batch_size * 4096 * 128
    assert sorted(set(copied.forward) - set(plain.forward)) == [MemoryKernel(0), MemoryKernel(32 * token)]
    assert sorted(set(copied.backward_input) - set(plain.backward_input)) == [MemoryKernel(0), MemoryKernel(48 * token)]
    alone = SPEC.model_copy(update={"layout": Layout(dp=16, tp=8, sequence_parallel=True)})
    plain, copied = (
        build_layer_kernels(alone, fused_projections=True, copies_queries=copies) for copies in (False, True)
    )
    assert set(copied.forward) - set(plain.forward) == {MemoryKernel(0)}, "a rank's one group is a view"
    whole = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"num_kv_heads": 32, "preset": None})})
    assert build_layer_kernels(whole, copies_queries=True) == build_layer_kernels(whole)


def test_heads_of_64_are_limited_by_exponentials() -> None:
    law = AttentionRates(extra_tokens=1600, narrow_factor=0.8)
    assert law.compute_slowdown(FlashAttention(0, 0, 4096, 128)) == pytest.approx(1 + 1600 / 4096)
    assert law.compute_slowdown(FlashAttention(0, 0, 4096, 64)) == pytest.approx(
        2 * (0.8 + NARROW_ROW_FACTOR * 1600 / 4096)
    )


HELD = 7168  # hidden size, divided into heads of each width


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("h100", "ours"),
        ("h100", "fsdp2"),
        ("h100", "megatron"),
        ("a100-80gb", "fsdp2"),
        ("a100-80gb", "deepspeed"),
        ("gb200", "ours"),
        ("gb200", "megatron"),
    ],
)
def test_narrower_heads_of_one_model_take_longer(name: str, stack: StackName) -> None:
    """Each model computes an equal number of FLOPs."""

    def compute_s(width: int) -> float:
        heads = HELD // width
        sizes = {"hidden_size": HELD, "num_heads": heads, "num_kv_heads": heads, "max_seq_len": 8192, "preset": None}
        return (
            Timer(CLUSTERS[name], STACKS)
            .get_step(
                SPEC.model_copy(
                    update={
                        "model": SPEC.model.model_copy(update=sizes),
                        "train": TRAIN.model_copy(update={"seq_len": 8192, "precision": "bf16"}),
                        "resources": Resources(device="cuda", stack=stack),
                    }
                )
            )
            .compute_s
        )

    narrow, between, wide = (compute_s(width) for width in (64, 112, 128))
    assert min(narrow, between) > wide * 1.002
    assert narrow != pytest.approx(between, rel=1e-3)


@pytest.mark.parametrize(("width", "measured"), [(64, 385.5), (112, 434.0), (128, 484.1)])
def test_trainer_attention_uses_the_rate_measured_on_an_h100(width: int, measured: float) -> None:
    """Compare with docs/notebook/2026-11-gpu.md, forward and backward, rows of 4,096."""
    chip, law = ACCELERATORS["H100 SXM"], STACKS["ours"].attention_hopper
    reached = (
        chip.bf16_flops
        * chip.attention_efficiency
        * law.peak_factor
        / law.compute_slowdown(FlashAttention(0, 0, 4096, width))
    )
    assert reached / 1e12 == pytest.approx(measured, rel=0.03)


def test_head_size_between_two_tiles_costs_the_larger_tile() -> None:
    padded, exact = AttentionRates(pads_heads=True), AttentionRates()
    assert padded.compute_slowdown(FlashAttention(0, 0, 4096, 112)) == pytest.approx(128 / 112)
    assert padded.compute_slowdown(FlashAttention(0, 0, 4096, 200)) == pytest.approx(256 / 200)
    assert exact.compute_slowdown(FlashAttention(0, 0, 4096, 112)) == pytest.approx(1.0)


def test_window_reduces_scores_but_not_rows() -> None:
    """Queries of every second layer see 1,024 of 4,096 tokens, 7/16 of their scores. The model keeps 23/32."""
    whole, part = _flash(), _flash(window=1024)
    assert part.flops / whole.flops == pytest.approx(23 / 32)
    assert (part.tokens, part.num_bytes) == (4096 * 23 / 32, whole.num_bytes)
    assert _flash(window=8192) == whole
    lost = [k.flops * (CUDNN_BLACKWELL.compute_slowdown(k) - 1) for k in (whole, part)]
    assert lost[1] == pytest.approx(lost[0]), "as many rows"


@pytest.mark.parametrize(("cp", "rows"), [(1, 1.0), (2, 1.75), (8, 6.25)])
def test_each_further_ring_step_repeats_part_of_the_row_time(cp: int, rows: float) -> None:
    spec = SPEC.model_copy(update={"layout": Layout(dp=64 // cp, cp=cp, zero=1)})
    assert _flash(spec).tokens == pytest.approx(4096 / rows)


def test_blackwell_ultra_takes_nine_tenths_of_blackwell_attention_time() -> None:
    for one, ultra in (("B200 SXM", "B300 SXM"), ("GB200", "GB300")):
        told = [ACCELERATORS[name].attention_efficiency for name in (one, ultra)]
        assert told[0] / told[1] == pytest.approx(0.9)
