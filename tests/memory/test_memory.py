"""A sample of what `make memory` holds, and the shortcuts that make the plan quick."""

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
from tests.memory.compare import found
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
def test_a_layout_needs_what_the_plan_says(layout: dict[str, Any]) -> None:
    """Of those that `make memory` draws at random, ones that were far off: split backward's gradients in two types,
    what selective recompute keeps, the reduce-scatter's buffer that waits for the next micro-batch. And ZeRO-3 that
    keeps what it gathered, which none of them draws."""
    train = {"global_batch": 8, "micro_batches": 4, "seq_len": 1024, "precision": "bf16"}
    fields = {"model": MODEL, "layout": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, **layout}}
    rows = found(parse_fields({**fields, "train": train}))
    assert all(abs(row.off) <= USUALLY for row in rows), [(row.words, row.stage, row.off) for row in rows]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_walks_the_norms_of_the_device_that_is_planned_for(device: str, recompute: str) -> None:
    """A GPU's is one kernel; walked as a CPU's a dry run of 8 B on 8 GPUs held 18% more than the plan said."""
    fields = {"model": {**MODEL, "num_layers": 2}, "layout": {"recompute": recompute}, "resources": {"device": device}}
    spec = parse_fields({**fields, "train": {"global_batch": 2, "seq_len": 1024, "precision": "bf16"}})
    (row,) = found(spec)
    assert abs(row.off) < 0.002, row.off


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
@pytest.mark.parametrize("pp", [2, 4])
def test_a_schedule_shows_all_its_moments_early(schedule: Schedule, chunks: int, pp: int) -> None:
    for stage in range(pp):
        pipe = StageSchedule(schedule, pp, chunks, stage, tuple(range(chunks)))
        assert set(find_peaks(pipe, 7 * pp)) == set(_find_peaks(pipe, 7 * pp))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1), ("zbv", 2), ("dualpipev", 2), ("gpipe", 1)],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_search_finds_the_fullest_of_all_stages(schedule: Schedule, chunks: int, zero: int) -> None:
    layout = {"pp": 8, "dp": 2, "zero": zero, "schedule": schedule, "virtual_stages": chunks}
    model = {"preset": "gpt-mini", "num_layers": 19}
    for micro_batches in (16, 32):
        train = {"global_batch": 2 * micro_batches, "micro_batches": micro_batches, "precision": "bf16"}
        spec = parse_fields({"model": model, "layout": layout, "train": train})
        every = [sum(get_memory(spec, stage).values()) for stage in range(8)]
        assert max(get_max_bytes(spec, stages) for stages in resolve(spec).partition.equal_stages) == max(every)


def test_a_split_backward_lets_go_of_a_micro_batch_when_its_weights_are_done() -> None:
    """The bags that weight gradients wait in once stayed full: a circle of graph and bag that nothing broke."""

    def peak(micro_batches: int) -> int:
        layout = {"pp": 2, "schedule": "interleaved_zero_bubble"}
        train = {"global_batch": micro_batches, "micro_batches": micro_batches, "seq_len": 64}
        spec = parse_fields({"model": {"preset": "gpt-tiny"}, "layout": layout, "train": train})
        return run_dry_step(spec, 1).peak_bytes

    assert peak(8) == pytest.approx(peak(4), rel=1e-3), "a bag left full makes it 1.5 times"


def test_what_waits_for_its_weights_keeps_its_gradient_and_its_input() -> None:
    """Per micro-batch that waits between two stages 3 hidden states of 1,024 x 512 x 2 bytes, 3 MiB, were not
    counted: of 134 MiB on stage 2, where two wait, 6."""
    model = {**MODEL, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 1024}
    layout = {"pp": 4, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 8, "micro_batches": 8, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(get_memory(spec, 2).values())
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


def test_weights_stay_gathered_until_the_weights_turn() -> None:
    """A split backward of ZeRO-1's last micro-batch was said to free each layer's: 18 MiB of 387 too few."""
    layout = {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved_zero_bubble", "recompute": "full"}
    model = {**MODEL, "hidden_size": 512, "num_heads": 8, "tied_embeddings": True}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_experts_of_a_capacity_keep_the_rows_they_were_filled_with() -> None:
    """1,024 tokens' rows, and as many as their buffers are larger by, 1.25 times, were left out of each layer."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": {}, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


def test_experts_of_one_rank_are_not_sharded() -> None:
    """dp 2 leaves each of ep 2 experts of its own, whole beside their masters: they were said to be gathered."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 4096}
    model = {**MODEL, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "fp32"}
    spec = parse_fields({"model": model, "layout": {"dp": 2, "ep": 2, "zero": 1}, "train": train})
    step = run_dry_step(spec, 0)
    assert sum(find_peak(spec, 0).levels) == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.02)


@pytest.mark.parametrize(("vocabulary", "layout"), [(8192, {}), (65_536, {}), (8192, {"dp": 2})])
def test_an_update_turns_gradients_into_fp32(vocabulary: int, layout: dict[str, Any]) -> None:
    """16 Mi elements at a time were planned beside all gradients: 11% too much of what has each alone, whose gradients
    go one by one; and of a table that has more, 7% too little."""
    model = {**MODEL, "arch": "gpt", "num_layers": 2, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    train = {"global_batch": 2, "micro_batches": 1, "seq_len": 32, "precision": "bf16_gradients"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 2048, "vocab_size": vocabulary}, "layout": layout, "train": train}
    )
    assert find_peak(spec, 0).when == "in the update"
    (only,) = found(spec)
    assert only.off == pytest.approx(0.0, abs=0.001)


def test_a_router_keeps_no_input_that_is_gathered_again() -> None:
    """Gathered again, a layer keeps a rank's part of each half's input, 1,024 x 1,024 x 4 / 2 bytes, and no whole."""
    experts = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    train = {"global_batch": 1, "micro_batches": 1, "seq_len": 1024, "precision": "fp32"}

    def kept(regather: bool) -> int:
        layout = {"tp": 2, "sequence_parallel": True, "regather": regather}
        spec = parse_fields({"model": {**MODEL, "moe": experts}, "layout": layout, "train": train})
        return get_layer_bytes(spec, moe=True)

    whole = 1024 * 1024 * 4
    assert kept(regather=False) - kept(regather=True) == 2 * (whole - whole // 2)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_a_head_gathers_its_last_layer_first_and_forgets_what_a_backward_used(stage: int) -> None:
    """Under ZeRO-3 the layer whose output is the stage's own is gathered before the table: 4.5 of 193 MiB were missing
    on stage 0. On stage 1 the graph of the last micro-batch's output kept messages: 4 of 54 MiB, no longer needed."""
    layout = {"dp": 2, "tp": 2, "pp": 3, "zero": 3, "schedule": "naive", "sequence_parallel": True}
    model = {**MODEL, "num_layers": 3, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 1024}
    train = {"global_batch": 6, "micro_batches": 3, "seq_len": 1024, "precision": "fp32"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 4 * stage)
    predicted = sum(find_peak(spec, stage).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.022)


def test_gradients_are_copied_when_they_fill_a_bucket_and_what_is_left_when_the_last_has_come() -> None:
    """Of 6 layers with 10 MiB of gradients each and a table of 4: after the third and the sixth 30 MiB, then the table.
    Of layers that fill a bucket, each by itself."""

    def copied(layer_bytes: int, count: int) -> list[int]:
        unit, buckets = ZeroUnit(layer_bytes // 4, layer_bytes // 4, layer_bytes // 4, 0), _Buckets(4)
        segments = [Segment(changes(), layer_bytes // 4, grouped=False)]
        found = [each.net[BUFFERS] // 2**20 for each in buckets.after(segments, unit, count)]
        last = buckets.add(2**20).then(buckets.rest())
        return [*found[::2], last.net[BUFFERS] // 2**20]

    assert copied(10 * 2**20, 6) == [0, 0, 30, 0, 0, 30, 4]
    assert copied(10 * 2**20, 4) == [0, 0, 30, 0, 14]
    assert copied(40 * 2**20, 5) == [40, 40, 40, 40, 40, 4]


def test_gradients_of_grouped_experts_wait_for_the_weights_turn_as_they_are() -> None:
    """No turn of the weights makes them: a product of several experts gives both its gradients at once. A layout of 18
    GiB, with 3 micro-batches waiting, was told 3.3 too few; this one 8 MiB of 215."""
    moe = {"num_experts": 16, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    layout = {"pp": 2, "schedule": "zbv", "virtual_stages": 2}
    model = {**MODEL, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 1024, "moe": moe}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 128, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 1)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_made_again_stops_at_the_last_tensor_saved(recompute: str, sequence_parallel: bool) -> None:
    """A recomputed layer was told with its last product and its sum over tp, which are never made again, and was made
    before the first gradients were gathered: 2.8 of 70 MiB too much."""
    layout = {"dp": 2, "tp": 4, "recompute": recompute, "sequence_parallel": sequence_parallel}
    model = {**MODEL, "num_layers": 2, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 1408, "vocab_size": 1024}
    train = {"global_batch": 4, "micro_batches": 1, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_answers_of_experts_of_a_capacity_stay_until_they_are_weighed() -> None:
    """What experts answered and the copy with a row of zeros have names until a layer's forward is over, 15 MiB each of
    416 where their weighted rows are the step's most."""
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 128, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": {"pp": 4}, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 2).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_the_last_whole_gradient_stays_until_shards_are_added_up() -> None:
    """A head's, of 32,000 x 768, was said to be freed before its shard was turned into fp32: 25 MiB of 752."""
    model = {**MODEL, "num_layers": 1, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16_gradients"}
    spec = parse_fields({"model": model, "layout": {"dp": 2, "zero": 2}, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_what_a_router_read_waits_for_its_weights_and_whole_experts_come_before_what_is_sharded() -> None:
    """Per micro-batch that waits 1,024 x 512 x 4 bytes of a router's input were not counted, and gradients of experts
    that no other rank holds were said to join their masters' after the first reduce: 3% of 2.5 GiB too few."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192, "moe": moe}
    layout = {"dp": 2, "pp": 2, "ep": 2, "zero": 2, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": model, "layout": layout, "train": train})
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)


@pytest.mark.parametrize("moe", [None, {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 1024}])
def test_gradients_that_fill_a_bucket_are_copied_in_the_middle_of_a_layer(moe: dict[str, Any] | None) -> None:
    """Those of the MLP while attention's scores are there: 5% were not counted, 12% with experts."""
    model = {**MODEL, "num_layers": 2, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "vocab_size": 512}
    layout = {"dp": 2, "pp": 2, "schedule": "naive"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 1024, "precision": "fp32", "attention": "unfused"}
    spec = parse_fields({"model": {**model, "moe": moe} if moe else model, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_zero_bubble", 2)])
def test_experts_are_reduced_by_themselves_and_turned_where_they_are_cut_along_another_dimension(
    schedule: str, chunks: int
) -> None:
    """4 experts a rank over 8 are cut along their rows. Their buffer waited for the next micro-batch, in the plan, with
    what is left of their layer: 61 of 981 MiB too much; and a gradient beside its turned copy was not in it."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 512}
    layout = {"dp": 16, "ep": 2, "pp": 2, "zero": 2, "schedule": schedule, "virtual_stages": chunks}
    train = {"global_batch": 64, "micro_batches": 4, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": {**model, "moe": moe}, "layout": layout, "train": train})
    step = run_dry_step(spec, 16)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_gradients_of_keys_and_values_are_summed_beside_all_that_they_are_summed_of(method: str) -> None:
    """A reduce-scatter leaves its share before what it read is let go: 6 of 144 MiB were not in the plan."""
    model = {**MODEL, "arch": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    layout = {"pp": 4, "cp": 2, "cp_method": method}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 2048, "precision": "fp32"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 2048, "vocab_size": 512}, "layout": layout, "train": train}
    )
    step = run_dry_step(spec, 2)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.02)


def test_a_router_keeps_no_input_that_a_norm_makes_again() -> None:
    """In fp32 what it reads is the norm's own output: 16 MiB of each micro-batch in flight, 165 of 2,849, too much."""
    moe = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 512, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 512}
    layout = {"pp": 2, "schedule": "1f1b", "recompute": "selective"}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "fp32"}
    spec = parse_fields({"model": {**model, "moe": moe}, "layout": layout, "train": train})
    step = run_dry_step(spec, 0)
    predicted = sum(find_peak(spec, 0).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.01)


def test_of_a_unit_each_gradient_is_let_go_when_its_copy_in_fp32_is_there() -> None:
    """FSDP2 copies one after the other, a table first: 14 of 138 MiB were missing where only the last lay beside its
    copy."""
    model = {**MODEL, "arch": "gpt", "num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4}
    layout = {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved_zero_bubble"}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": {**model, "ffn_hidden_size": 1024}, "layout": layout, "train": train})
    (first, _) = found(spec)
    assert first.off == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_forward_has_scores_twice_at_most(recompute: str) -> None:
    """Scaled ones had a name until their softmax was over, and were there a third time: 2 of 48 MiB."""
    model = {**MODEL, "num_layers": 1, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": 1024, "precision": "bf16", "attention": "unfused"}
    fields = {"model": {**model, "ffn_hidden_size": 512}, "layout": {"recompute": recompute}, "train": train}
    (only,) = found(parse_fields(fields))
    assert only.off == pytest.approx(0.0, abs=0.005)


def test_positions_fill_a_bucket_before_a_tied_table_is_summed() -> None:
    """They come first: what a bucket then holds, 28 of 839 MiB in a layout drawn at random, lies beside three of the
    table's gradients. Here 30 of 170."""
    model = {**MODEL, "arch": "gpt", "num_layers": 1, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    model |= {"ffn_hidden_size": 2048, "vocab_size": 8192, "max_seq_len": 24_576, "tied_embeddings": True}
    train = {"global_batch": 2, "micro_batches": 1, "seq_len": 128, "precision": "bf16_state"}
    (only,) = found(parse_fields({"model": model, "layout": {"dp": 2}, "train": train}))
    assert only.off == pytest.approx(0.0, abs=0.005)


def test_what_two_chunks_of_a_rank_hand_each_other_lies_there_once() -> None:
    """A gradient between them is one's input's and the other's output's while the weights of both wait: 4 of 178 MiB
    were counted twice in a layout of 4 stages, 2 of 109 in this one."""
    model = {**MODEL, "arch": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    layout = {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "recompute": "full"}
    train = {"global_batch": 4, "micro_batches": 4, "seq_len": 1024, "precision": "bf16_state"}
    spec = parse_fields(
        {"model": {**model, "ffn_hidden_size": 1024, "vocab_size": 512}, "layout": layout, "train": train}
    )
    step = run_dry_step(spec, 1)
    predicted = sum(find_peak(spec, 1).levels)
    assert predicted == pytest.approx(step.peak_bytes + step.optimizer_bytes, rel=0.005)
