"""Corrections from past runs: the median of comparable runs, and an interval from their spread."""

from __future__ import annotations

import statistics
from random import Random
from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.learning import (
    apply_runs,
    compute_correction,
    compute_memory_correction,
    compute_tensor_bytes,
    find_comparable_runs,
    get_run_group,
    get_safe_peak_bytes,
    is_within_margin,
)
from planner.cost.timing import Timer
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster, NodeSpan
from planner.hardware.kernel_time import compute_collective_seconds
from planner.hardware.profile import LinkPoint, MeasuredRun, strip_spec
from planner.report import format_estimate

CPU, H100 = CLUSTERS["cpu"], CLUSTERS["h100"]


def build_spec(preset: str = "gpt-tiny", precision: str = "fp32", **layout: Any) -> JobSpec:
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 128, "precision": precision}
    return parse_spec({"model": {"preset": preset}, "layout": layout, "train": train})


def build_run(spec: JobSpec, step_s: float, peak_bytes: int | None = None, *, tells_copies: bool = True) -> MeasuredRun:
    return MeasuredRun(spec=strip_spec(spec), steps=20, step_s=step_s, peak_bytes=peak_bytes, tells_copies=tells_copies)


def test_fewer_than_three_runs_have_no_spread() -> None:
    assert compute_correction([1.2, 1.3]) is None
    assert compute_correction([]) is None


def test_equal_runs_give_an_interval_of_one_percent() -> None:
    found = compute_correction([1.2, 1.2, 1.2])
    assert found is not None
    assert found.margin == 0.01, "words said so, and the figure 0"


def test_outlier_run_hardly_moves_the_median() -> None:
    steady = [1.19, 1.20, 1.21, 1.20] * 5
    found = compute_correction([*steady, 9.0])
    assert found is not None
    assert found.ratio == pytest.approx(1.20)
    assert found.margin < 0.02, "twenty of twenty-one are near"
    small = compute_correction([1.2, 1.2, 9.0])
    assert small is not None
    assert small.margin > 0.8, "one of three does not count as an outlier"


def test_run_four_times_slower_than_predicted_widens_the_interval_threefold() -> None:
    """The interval is a share of the measured time, so 75% less would mean 1.75 times."""
    found = compute_correction([1.0] * 7 + [4.0])
    assert found is not None
    assert (found.margin, is_within_margin(found.margin, 4.0, found.ratio)) == (3.0, True)
    assert [is_within_margin(0.5, measured, 1.0) for measured in (0.49, 0.5, 1.5, 1.51)] == [False, True, True, False]


@pytest.mark.parametrize("runs", [3, 4, 6, 8, 20])
def test_interval_contains_nine_of_ten_later_runs(runs: int) -> None:
    random, inside = Random(runs), []
    for _ in range(2000):
        seen = [random.lognormvariate(0.2, 0.08) for _ in range(runs)]
        found, later = compute_correction(seen), random.lognormvariate(0.2, 0.08)
        assert found is not None
        inside.append(is_within_margin(found.margin, later, found.ratio))
    assert 0.875 <= statistics.mean(inside) <= 0.935


def test_runs_of_other_precision_or_rank_count_are_excluded() -> None:
    runs = [
        build_run(build_spec(dp=2), 1.0),
        build_run(build_spec(dp=4), 2.0),
        build_run(build_spec(precision="bf16", dp=2), 3.0),
    ]
    assert find_comparable_runs(build_spec(tp=2).model, get_run_group(build_spec(tp=2)), runs) == runs[:1]


def test_enough_runs_of_the_model_itself_exclude_other_runs() -> None:
    tiny, mini = build_spec(dp=2), build_spec("gpt-mini", dp=2)
    timer = Timer(CPU)
    tiny_s, mini_s = timer.get_step(tiny).step_s, timer.get_step(mini).step_s
    runs = [*(build_run(mini, 2 * mini_s) for _ in range(3)), *(build_run(tiny, 5 * tiny_s) for _ in range(2))]
    few = Timer(apply_runs(CPU, runs)).get_correction(tiny)
    assert few is not None
    assert (few.runs, few.ratio) == (5, pytest.approx(2.0))
    enough = Timer(apply_runs(CPU, [build_run(tiny, 5 * tiny_s), *runs])).get_correction(tiny)
    assert enough is not None
    assert (enough.runs, enough.ratio) == (3, pytest.approx(5.0))


def test_rank_count_without_runs_is_scaled_like_the_nearest() -> None:
    """Without the correction, `auto` would choose the uncorrected rank count as the fastest."""
    two, three, eight = build_spec(dp=2), build_spec("gpt-mini", pp=3, schedule="gpipe"), build_spec(dp=4, tp=2)
    timer = Timer(CPU)
    few, many = (
        [build_run(spec, times * timer.get_step(spec).step_s)] * 3 for spec, times in ((two, 4.0), (eight, 9.0))
    )
    cluster = apply_runs(CPU, [*few, *many])
    assert Timer(cluster).get_step(three).step_s == pytest.approx(4 * timer.get_step(three).step_s, rel=0.01)
    said = estimate(three, cluster)["time"]["interval"]
    assert (said["share"], said["basis"]) == (9.0, "data sheet"), "the error is unknown"
    assert "scaled by 3 runs here with other rank counts" in said["words"]
    assert Timer(apply_runs(CPU, few[:2])).get_correction(three) is None, "two runs show no spread"


def test_memory_beyond_tensors_becomes_the_allowance_of_the_host() -> None:
    small, large = build_spec(dp=2), build_spec("gpt2", dp=2)
    peak = round(compute_tensor_bytes(large) * 1.25)
    cluster = apply_runs(CPU, [build_run(large, 1.0, peak)] * 3)
    assert cluster.accelerator.fragmentation == pytest.approx(0.25)
    told = estimate(large, cluster)["peak_memory_bytes"] - CPU.accelerator.reserved_bytes
    assert told == pytest.approx(peak, rel=1e-6)
    sure = estimate(large, cluster)["memory_interval"]
    assert (sure["basis"], sure["words"]) == ("runs", "from 3 runs here, ±1%")
    # A small process consists mostly of torch's base memory.
    unmoved = apply_runs(CPU, [build_run(small, 1.0, 10 * compute_tensor_bytes(small))] * 3)
    assert unmoved.accelerator.fragmentation == CPU.accelerator.fragmentation


def test_gpu_peak_separates_tensors_from_allocator_overhead() -> None:
    """Keep the allocator's 10% separate from the 2% that runs allocated beyond the counted tensors."""
    spec = build_spec("gpt2", dp=2)
    spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"device": "cuda"})})
    cluster = apply_runs(H100, [build_run(spec, 1.0, round(compute_tensor_bytes(spec) * 1.02))] * 3)
    before, after = (estimate(spec, one) for one in (H100, cluster))
    reserved = H100.accelerator.reserved_bytes
    told = (after["peak_memory_bytes"] - reserved) / (before["peak_memory_bytes"] - reserved)
    assert told == pytest.approx(1.02, rel=1e-6)
    room, found = 80 * 2**30, compute_memory_correction(cluster.runs)
    assert found is not None
    assert get_safe_peak_bytes(cluster, spec, found, room) == int((room - 2**29) / (1 + 0.15 + 0.01))
    sure = after["memory_interval"]
    assert (sure["basis"], sure["runs"]) == ("runs", 3)
    assert sure["share"] == pytest.approx(0.15 + 0.01 + 2**29 / after["peak_memory_bytes"])
    assert sure["words"].startswith("tensors from 3 runs here, Meshboard's trainer, ±")


def test_checkpoint_replicas_count_for_the_run_and_not_for_the_process() -> None:
    spec = build_spec("gpt2", dp=2)
    saved = spec.model_copy(update={"train": spec.train.model_copy(update={"checkpoint_every": 10})})
    peak = round(1.1 * compute_tensor_bytes(saved))
    cluster = apply_runs(CPU, [build_run(saved, 1.0, peak)] * 3)
    told = estimate(saved, cluster)["peak_memory_bytes"] - CPU.accelerator.reserved_bytes
    assert told == pytest.approx(peak, rel=1e-6)
    # Older runs do not report whether they made replicas.
    old = apply_runs(CPU, [build_run(spec, 1.0, peak, tells_copies=False)] * 3)
    assert old.accelerator.fragmentation == CPU.accelerator.fragmentation


@pytest.mark.parametrize("times", [0.8, 1.0, 3.0])
def test_interval_contains_past_runs_far_from_the_tensor_sum(times: float) -> None:
    spec = build_spec("gpt2", dp=2)
    peak = round(times * compute_tensor_bytes(spec))
    told = estimate(spec, apply_runs(CPU, [build_run(spec, 1.0, peak)] * 3))
    tensors = told["peak_memory_bytes"] - CPU.accelerator.reserved_bytes
    assert is_within_margin(told["memory_interval"]["share"], peak, tensors)


def build_link_cluster(*calls: tuple[str, int, int, float]) -> MeasuredRun:
    points = [
        LinkPoint(op=op, group_size=size, payload_bytes=payload, seconds=seconds)  # type: ignore[arg-type]
        for op, size, payload, seconds in calls
    ]
    return build_run(build_spec(dp=2, tp=2), 0.2).model_copy(update={"links": tuple(points)})


@pytest.mark.parametrize(
    "calls",
    [
        [("all_reduce", 2, 2**20, 0.010)],
        [("all_reduce", 2, 2**18, 0.005), ("all_reduce", 2, 2**21, 0.0177), ("all_reduce", 4, 4, 0.0116)],
        [("all_gather", 4, 2**20, 0.008), ("reduce_scatter", 4, 2**22, 0.030), ("recv", 2, 2**10, 9.0)],
        [("all_reduce", 2, 2**17, 0.02), ("all_reduce", 2, 2**21, 0.01)],
    ],
    ids=["one call", "three sizes", "compared with a recv that waited", "a small one that took longer"],
)
def test_fitted_links_reproduce_the_calls_of_a_run(calls: list[tuple[str, int, int, float]]) -> None:
    cluster = apply_runs(CPU, [build_link_cluster(*calls)])
    for op, size, payload, seconds in calls:
        told = compute_collective_seconds(op, payload, NodeSpan(size, 1), cluster)  # type: ignore[arg-type]
        assert op == "recv" or seconds / 2 < told < 2 * seconds


def test_runs_that_show_only_latency_keep_the_data_sheet_rate() -> None:
    assert apply_runs(CPU, [build_link_cluster(("all_reduce", 2, 64, 0.01))]).node == CPU.node


# These are mean calls of four small runs on two cores. The larger calls took no more time.
SMALL = [
    [("all_reduce", 2, 2**15, 0.0011), ("all_reduce", 4, 2**14, 0.0031), ("all_gather", 2, 2**17, 0.0009)],
    [("all_reduce", 2, 2**15, 0.0013), ("reduce_scatter", 2, 2**17, 0.0007), ("all_reduce", 4, 4, 0.0036)],
    [("all_reduce", 2, 2**16, 0.0009), ("all_gather", 4, 2**15, 0.0018)],
    [("all_reduce", 4, 2**16, 0.0033), ("all_gather", 2, 2**17, 0.0008)],
]


def test_rate_not_determined_by_small_calls_keeps_the_data_sheet() -> None:
    cluster = apply_runs(CPU, [build_link_cluster(*calls) for calls in SMALL])
    assert cluster.node.bytes_per_s == CPU.node.bytes_per_s
    assert cluster.node.latency_s > 4 * CPU.node.latency_s, "which they do tell"
    assert (cluster.link_runs, cluster.num_rate_runs) == (4, 0)
    assert compute_collective_seconds("all_reduce", 2**30, NodeSpan(4, 1), cluster) > 1, "1.5 GiB over 1 GB/s"


def test_fitted_rate_is_at_least_that_of_the_fastest_call() -> None:
    cluster = apply_runs(CPU, [build_link_cluster(("all_gather", 2, 2**19, 5.1e-4), ("all_gather", 2, 2**21, 5.0e-4))])
    assert cluster.node.bytes_per_s == 2**20 / 5.0e-4 > CPU.node.bytes_per_s
    assert cluster.num_rate_runs == 1


@pytest.mark.parametrize("seed", range(20))
def test_fit_recovers_well_determined_links_and_never_far_exceeds_a_call(seed: int) -> None:
    random = Random(seed)

    def build_link_run(sizes: list[int], latency_s: float) -> MeasuredRun:
        calls = [("all_reduce", 2, size, (3 * latency_s + size / 2e8) * random.uniform(0.9, 1.1)) for size in sizes]
        return build_link_cluster(*calls)

    told = apply_runs(CPU, [build_link_run([2**14, 2**18, 2**22, 2**24], 1e-3) for _ in range(3)])
    assert told.node.bytes_per_s * told.node.efficiency == pytest.approx(2e8, rel=0.2)
    assert told.node.latency_s == pytest.approx(1e-3, rel=0.3)
    assert told.num_rate_runs == 3
    small = apply_runs(CPU, [build_link_run([2**14, 2**15, 2**16], 1e-3)])
    assert small.node.bytes_per_s <= CPU.node.bytes_per_s, "3 ms before each, and 0.3 for the bytes of the largest"


def test_calls_of_equal_size_give_a_slowdown_of_the_data_sheet_rate() -> None:
    cluster = apply_runs(
        CPU, [build_link_cluster(("all_reduce", 2, 2**17, 0.01), ("all_reduce", 2, 2**17 + 2**13, 0.0101))]
    )
    times = CPU.node.bytes_per_s * CPU.node.efficiency / cluster.node.bytes_per_s
    assert cluster.node.latency_s == pytest.approx(times * CPU.node.latency_s)
    assert compute_collective_seconds("all_reduce", 2**17, NodeSpan(2, 1), cluster) == pytest.approx(0.01, rel=0.05)
    assert cluster.node.bytes_per_s > 2**17 / 0.01, "latency takes a part of it"


CALL = ("all_reduce", 2, 2**20, 0.01)


def get_words(cluster: Cluster, spec: JobSpec) -> str:
    return estimate(spec, cluster)["time"]["interval"]["words"]


def test_words_describe_links_fitted_from_one_or_two_runs() -> None:
    two, unlike = build_spec(dp=2), build_spec(dp=4)
    one = apply_runs(CPU, [build_link_cluster(CALL)])
    assert get_words(one, two) == "an uncalibrated CPU, links from 1 run here, within a factor of 10"
    assert get_words(apply_runs(CPU, [build_link_cluster(CALL)] * 2), two).split(", ")[1] == "links from 2 runs here"
    sheet = "Meshboard's trainer, 40% of the step waits for the host, within a factor of 3.3"
    assert get_words(apply_runs(H100, [build_link_cluster(CALL)]), two) == f"data sheet, links from 1 run here, {sheet}"
    assert "links from 1 run here" in format_estimate(two, estimate(two, one), [])
    # Three runs correct plans with an equal number of ranks. Other plans use the fitted links only.
    enough = apply_runs(CPU, [build_link_cluster(CALL)] * 3)
    assert get_words(enough, unlike).startswith("from 3 runs here, ±")
    assert ", links from 3 runs here, scaled by 3 runs here with other rank counts, " in get_words(enough, two)


def test_words_omit_links_without_effect_on_the_figure() -> None:
    one = apply_runs(CPU, [build_link_cluster(CALL)])
    assert "links" not in get_words(one, build_spec()), "one rank has none"
    small = apply_runs(
        CPU, [build_link_cluster(("all_reduce", 2, 64, 0.01)), build_link_cluster(("recv", 2, 2**20, 9.0))]
    )
    assert "links" not in get_words(small, build_spec(dp=2)), "latency alone, and calls that waited for a sender"
    mixed = apply_runs(CPU, [build_link_cluster(CALL), build_link_cluster(("recv", 2, 2**20, 9.0))])
    assert "links from 1 run here" in get_words(mixed, build_spec(dp=2))
    few = apply_runs(CPU, [build_link_cluster(*calls) for calls in SMALL])
    assert "link latency from 4 runs here" in get_words(few, build_spec(dp=2)), "the rate is not from the runs"
    wide = one.model_copy(update={"per_node": 2})
    assert "links inside a host from 1 run here" in get_words(wide, build_spec(dp=4))
