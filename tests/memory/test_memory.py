"""Check a sample of `make memory`, and the shortcuts that make the plan fast."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.memory import find_peak, get_layer_bytes, get_max_bytes, get_memory
from planner.cost.memory.autograd import Segment
from planner.cost.memory.chunk import _Buckets
from planner.cost.memory.moments import StageSchedule, _find_peaks, find_peaks
from planner.cost.memory.tape import BUFFERS
from planner.cost.memory.zero import ZeroUnit, changes
from planner.cost.resolved_plan import resolve
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import Schedule
from tests.memory.__main__ import USUALLY
from tests.memory.compare import compare_stages
from tests.support.tiers import extend_after
from workers.dry_run import run_dry_step

MODEL = {
    "arch": "llama",
    "num_layers": 4,
    "hidden_size": 1024,
    "num_heads": 16,
    "num_kv_heads": 8,
    "ffn_hidden_size": 3328,
    "vocab_size": 32_000,
    "max_seq_len": 1024,
    "tied_embeddings": False,
}


def slow(layout: dict[str, Any]) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "zbv", "virtual_stages": 2, "zero": 1},
        slow({"schedule": "zbv", "virtual_stages": 2, "zero": 1, "recompute": "selective", "regather": True}),
        slow(
            {"schedule": "interleaved_1f1b", "virtual_stages": 2, "zero": 1, "recompute": "selective", "regather": True}
        ),
        slow({"schedule": "interleaved_zero_bubble", "zero": 2}),
        {"schedule": "looped_bfs", "virtual_stages": 2, "zero": 3, "keep_gathered": True},
    ],
)
def test_planned_memory_matches_a_dry_run(layout: dict[str, Any]) -> None:
    """Check random layouts of `make memory` that once had large errors, and ZeRO-3 without reshard."""
    train = {"global_batch": 8, "micro_batches": 4, "seq_len": 1024, "precision": "bf16"}
    fields = {"model": MODEL, "layout": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, **layout}}
    rows = compare_stages(parse_fields({**fields, "train": train}))
    assert all(abs(row.error) <= USUALLY for row in rows), [(row.describe, row.stage, row.error) for row in rows]


@pytest.mark.parametrize("recompute", extend_after(1, ["none", "selective", "full"]))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dry_run_uses_norm_kernels_of_the_planned_device(device: str, recompute: str) -> None:
    """Check norms, which are one kernel on a GPU. As CPU kernels they needed 18% more."""
    fields = {"model": {**MODEL, "num_layers": 2}, "layout": {"recompute": recompute}, "resources": {"device": device}}
    spec = parse_fields({**fields, "train": {"global_batch": 2, "seq_len": 1024, "precision": "bf16"}})
    (row,) = compare_stages(spec)
    assert abs(row.error) < 0.002, row.error


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
        ("naive", 1),
    ],
)
@pytest.mark.parametrize("pp", extend_after(1, [4, 2]))
def test_early_micro_batches_reach_the_peak_of_a_schedule(schedule: Schedule, chunks: int, pp: int) -> None:
    for stage in range(pp):
        pipe = StageSchedule(schedule, pp, chunks, stage, tuple(range(chunks)))
        assert set(find_peaks(pipe, 7 * pp)) == set(_find_peaks(pipe, 7 * pp))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1), ("zbv", 2), ("dualpipev", 2), ("gpipe", 1)],
)
@pytest.mark.parametrize("zero", extend_after(1, [1, 0]))
def test_search_finds_the_fullest_stage(schedule: Schedule, chunks: int, zero: int) -> None:
    layout = {"pp": 8, "dp": 2, "zero": zero, "schedule": schedule, "virtual_stages": chunks}
    model = {"preset": "gpt-mini", "num_layers": 19}
    for micro_batches in (16, 32):
        train = {"global_batch": 2 * micro_batches, "micro_batches": micro_batches, "precision": "bf16"}
        spec = parse_fields({"model": model, "layout": layout, "train": train})
        every = [sum(get_memory(spec, stage).values()) for stage in range(8)]
        assert max(get_max_bytes(spec, stages) for stages in resolve(spec).partition.equal_stages) == max(every)


def test_split_backward_frees_a_micro_batch_after_its_weight_gradients() -> None:
    """Check that weight-gradient inputs are freed, which a reference cycle once kept alive."""

    def peak(micro_batches: int) -> int:
        layout = {"pp": 2, "schedule": "interleaved_zero_bubble"}
        train = {"global_batch": micro_batches, "micro_batches": micro_batches, "seq_len": 64}
        spec = parse_fields({"model": {"preset": "gpt-tiny"}, "layout": layout, "train": train})
        return run_dry_step(spec, 1).peak_bytes

    assert peak(8) == pytest.approx(peak(4), rel=1e-3), "a bag left full makes it 1.5 times"


def test_waiting_micro_batch_keeps_gradient_and_input() -> None:
    """Check 3 hidden states of 1,024 x 512 x 2 bytes, 3 MiB, per waiting micro-batch."""
    model = {**MODEL, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 1024}
    layout = {"pp": 4, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 8, "micro_batches": 8, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(get_memory(spec, 2).values())
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


def test_weights_stay_gathered_until_weight_gradients() -> None:
    """Check ZeRO-1 with a split backward, whose last micro-batch does not free layers early: 18 of 387 MiB."""
    layout = {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved_zero_bubble", "recompute": "full"}
    model = {**MODEL, "hidden_size": 512, "num_heads": 8, "tied_embeddings": True}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_experts_with_a_capacity_keep_their_input_rows() -> None:
    """Check rows of 1,024 tokens and buffers that are 1.25 times larger."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": {}, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


def test_experts_of_one_rank_are_not_sharded() -> None:
    """Check dp 2 with ep 2, in which each rank has its own experts with their masters."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 4096}
    model = {**MODEL, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "fp32"}
    spec = parse_fields({"model": model, "layout": {"dp": 2, "ep": 2, "zero": 1}, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.02)


@pytest.mark.parametrize(("vocabulary", "layout"), extend_after(1, [(8192, {"dp": 2}), (8192, {}), (65_536, {})]))
def test_update_converts_gradients_to_fp32(vocabulary: int, layout: dict[str, Any]) -> None:
    """Check fp32 gradients of the update, one by one, and of an embedding that is larger than 16 Mi elements."""
    model = {**MODEL, "arch": "gpt", "num_layers": 2, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    train = {"global_batch": 2, "micro_batches": 1, "seq_len": 32, "precision": "bf16_gradients"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 2048, "vocab_size": vocabulary}, "layout": layout, "train": train}
    )
    assert find_peak(spec, 0).when == "in the update"
    (only,) = compare_stages(spec)
    assert only.error == pytest.approx(0.0, abs=0.001)


def test_router_keeps_no_regathered_input() -> None:
    """Check that a regathered layer keeps shards of 1,024 x 1,024 x 4 / 2 bytes, and no whole input."""
    experts = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    train = {"global_batch": 1, "micro_batches": 1, "seq_len": 1024, "precision": "fp32"}

    def kept(regather: bool) -> int:
        layout = {"tp": 2, "sequence_parallel": True, "regather": regather}
        spec = parse_fields({"model": {**MODEL, "moe": experts}, "layout": layout, "train": train})
        return get_layer_bytes(spec, moe=True)

    whole = 1024 * 1024 * 4
    assert kept(regather=False) - kept(regather=True) == 2 * (whole - whole // 2)


@pytest.mark.parametrize("stage", [0, 1])
def test_stage_without_head_gathers_its_last_layer_first(stage: int) -> None:
    """Check the gather order of ZeRO-3 on stage 0, and freed messages on stage 1."""
    layout = {"dp": 2, "tp": 2, "pp": 3, "zero": 3, "schedule": "naive", "sequence_parallel": True}
    model = {**MODEL, "num_layers": 3, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 1024}
    train = {"global_batch": 6, "micro_batches": 3, "seq_len": 1024, "precision": "fp32"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 4 * stage)
    predicted = sum(find_peak(spec, stage).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.022)


def test_gradients_are_copied_by_bucket_and_the_rest_at_the_end() -> None:
    """Check 6 layers with 10 MiB of gradients each and an embedding of 4 MiB, with buckets of 30 MiB."""

    def copied(layer_bytes: int, count: int) -> list[int]:
        unit, buckets = ZeroUnit(layer_bytes // 4, layer_bytes // 4, layer_bytes // 4, 0), _Buckets(4)
        segments = [Segment(changes(), layer_bytes // 4, grouped=False)]
        found = [each.net[BUFFERS] // 2**20 for each in buckets.after(segments, unit, count)]
        last = buckets.add(2**20).then(buckets.rest())
        return [*found[::2], last.net[BUFFERS] // 2**20]

    assert copied(10 * 2**20, 6) == [0, 0, 30, 0, 0, 30, 4]
    assert copied(10 * 2**20, 4) == [0, 0, 30, 0, 14]
    assert copied(40 * 2**20, 5) == [40, 40, 40, 40, 40, 4]


def test_gradients_of_grouped_experts_are_computed_at_once() -> None:
    """Check grouped matmuls, which compute both gradients at once: 8 of 215 MiB."""
    moe = {"num_experts": 16, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    layout = {"pp": 2, "schedule": "zbv", "virtual_stages": 2}
    model = {**MODEL, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 1024, "moe": moe}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 128, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 1)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", extend_after(1, ["full", "none"]))
def test_recompute_stops_at_the_last_saved_tensor(recompute: str, sequence_parallel: bool) -> None:
    """Check that recompute omits the last matmul and its TP sum: 2.8 of 70 MiB."""
    layout = {"dp": 2, "tp": 4, "recompute": recompute, "sequence_parallel": sequence_parallel}
    model = {**MODEL, "num_layers": 2, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 1408, "vocab_size": 1024}
    train = {"global_batch": 4, "micro_batches": 1, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_outputs_of_experts_with_a_capacity_stay_until_they_are_weighted() -> None:
    """Check expert outputs and their padded copy, 15 MiB each of 416, until the forward of a layer ends."""
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 128, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": {"pp": 4}, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 2).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_last_gradient_stays_until_its_shard_is_converted() -> None:
    """Check the gradient of a head of 32,000 x 768 until its shard is fp32: 25 of 752 MiB."""
    model = {**MODEL, "num_layers": 1, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": {"dp": 2, "zero": 2}, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_router_input_waits_and_unsharded_experts_come_first() -> None:
    """Check router inputs of 1,024 x 512 x 4 bytes, and gradients of experts without replicas."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192, "moe": moe}
    layout = {"dp": 2, "pp": 2, "ep": 2, "zero": 2, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


@pytest.mark.parametrize("moe", [None, {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 1024}])
def test_full_bucket_is_copied_inside_a_layer(moe: dict[str, Any] | None) -> None:
    """Check MLP gradients during attention scores: 5% of the peak, 12% with experts."""
    model = {**MODEL, "num_layers": 2, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "vocab_size": 512}
    layout = {"dp": 2, "pp": 2, "schedule": "naive"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "fp32", "attention": "unfused"}
    spec = parse_fields({"model": {**model, "moe": moe} if moe else model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize(("schedule", "chunks"), extend_after(1, [("interleaved_zero_bubble", 2), ("1f1b", 1)]))
def test_experts_are_reduced_separately_and_transposed(schedule: str, chunks: int) -> None:
    """Check buffers of experts that are sharded by rows: 61 of 981 MiB."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 512}
    layout = {"dp": 16, "ep": 2, "pp": 2, "zero": 2, "schedule": schedule, "virtual_stages": chunks}
    train = {"global_batch": 64, "micro_batches": 4, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": {**model, "moe": moe}, "layout": layout, "train": train})
    step = run_dry_step(spec, 16)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_reduce_scatter_of_keys_and_values_keeps_its_input(method: str) -> None:
    """Check a reduce-scatter whose input and output exist at the same time: 6 of 144 MiB."""
    model = {**MODEL, "arch": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    layout = {"pp": 4, "cp": 2, "cp_method": method}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 2048, "precision": "fp32"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 2048, "vocab_size": 512}, "layout": layout, "train": train}
    )
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.02)


def test_router_keeps_no_recomputed_norm_output() -> None:
    """Check a fp32 router whose input is the output of the norm: 16 MiB per micro-batch in flight."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 512}
    layout = {"pp": 2, "schedule": "1f1b", "recompute": "selective"}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "fp32"}
    spec = parse_fields({"model": {**model, "moe": moe}, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_gradients_of_a_unit_are_freed_one_by_one() -> None:
    """Check FSDP2, which copies gradients one by one, the embedding first: 14 of 138 MiB."""
    model = {**MODEL, "arch": "gpt", "num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4}
    layout = {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": {**model, "ffn_hidden_size": 1024}, "layout": layout, "train": train})
    (first, _) = compare_stages(spec)
    assert first.error == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("recompute", extend_after(1, ["none", "selective", "full"]))
def test_forward_has_at_most_two_copies_of_scores(recompute: str) -> None:
    """Check that scaled scores are freed before the softmax ends: 2 of 48 MiB."""
    model = {**MODEL, "num_layers": 1, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 1024, "precision": "bf16", "attention": "unfused"}
    fields = {"model": {**model, "ffn_hidden_size": 512}, "layout": {"recompute": recompute}, "train": train}
    (only,) = compare_stages(parse_fields(fields))
    assert only.error == pytest.approx(0.0, abs=0.005)


def test_positions_fill_a_bucket_before_a_tied_embedding() -> None:
    """Check the bucket with positions next to three gradients of a tied embedding: 30 of 170 MiB."""
    model = {**MODEL, "arch": "gpt", "num_layers": 1, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    model |= {"ffn_hidden_size": 2048, "vocab_size": 8192, "max_seq_len": 24_576, "tied_embeddings": True}
    train = {"global_batch": 2, "micro_batches": 1, "seq_len": 128, "precision": "bf16_state"}
    (only,) = compare_stages(parse_fields({"model": model, "layout": {"dp": 2}, "train": train}))
    assert only.error == pytest.approx(0.0, abs=0.005)


def test_gradient_between_chunks_of_a_rank_counts_once() -> None:
    """Check that a gradient between two chunks of a rank counts once: 2 of 109 MiB."""
    model = {**MODEL, "arch": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    layout = {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "recompute": "full"}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "bf16_state"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 1024, "vocab_size": 512}, "layout": layout, "train": train}
    )
    step = run_dry_step(spec, 1)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)
