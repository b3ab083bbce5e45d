"""Collective times from the bus bandwidth that they reach (nccl-tests doc/PERFORMANCE.md)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.telemetry.items import Op
from planner.cost.estimate import estimate
from planner.cost.timing import get_step_timing
from planner.facts.collectives import get_bus_factor
from planner.facts.parse_spec import parse_fields
from planner.hardware.catalog import CLUSTERS, find_cluster
from planner.hardware.cluster import NodeSpan, get_node_span
from planner.hardware.kernel_time import compute_collective_seconds, compute_gemm_seconds
from planner.hardware.kernels import Gemm
from tests.planner.hardware.reference_specs import SPEC

CLUSTER = CLUSTERS["a100-80gb"]
INSIDE = CLUSTER.node.bytes_per_s * CLUSTER.node.efficiency
OUT = CLUSTER.network.bytes_per_s * CLUSTER.network.efficiency
LARGE = 1e12  # bytes: latency is negligible at this size


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize(
    ("group", "reached"),
    [
        (NodeSpan(8, 1), INSIDE),
        (NodeSpan(1, 8), OUT),
        (NodeSpan(4, 2), 4 * OUT),
        (NodeSpan(8, 2), 8 * OUT),
    ],
)
def test_large_ring_reaches_the_bandwidth_of_its_slowest_link(op: Op, group: NodeSpan, reached: float) -> None:
    n = group.per_node * group.nodes
    bus_bandwidth = get_bus_factor(op, n) * LARGE / compute_collective_seconds(op, LARGE, group, CLUSTER)
    assert bus_bandwidth == pytest.approx(reached, rel=1e-3)


def test_each_all_to_all_rank_sends_its_own_shard_out_of_the_node() -> None:
    assert compute_collective_seconds("all_to_all", LARGE, NodeSpan(8, 2), CLUSTER) == pytest.approx(
        LARGE / 2 / OUT, rel=1e-3
    )
    assert compute_collective_seconds("all_to_all", LARGE, NodeSpan(8, 1), CLUSTER) == pytest.approx(
        LARGE * 7 / 8 / INSIDE, rel=1e-3
    )


def test_small_all_reduce_costs_its_hops() -> None:
    """Expect 2 x 7 hops of NVLink and NCCL's base."""
    assert compute_collective_seconds("all_reduce", 0, NodeSpan(8, 1), CLUSTER) == pytest.approx(8.4e-6 + 14 * 3.4e-6)


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all", "barrier", "send"])
def test_group_of_one_costs_nothing(op: Op) -> None:
    assert compute_collective_seconds(op, LARGE, NodeSpan(1, 1), CLUSTER) == 0


def test_odd_number_of_tokens_keeps_rows_aligned() -> None:
    """A weight gradient sums over tokens, and each token is a row. 4,095 tokens cost about as much as 4,096."""
    fields = {"model": {"preset": "llama3-8b"}, "resources": {"device": "cuda"}}
    odd, even = (
        get_step_timing(
            parse_fields({**fields, "train": {"global_batch": 1, "seq_len": n, "precision": "bf16"}}), CLUSTER
        )
        for n in (4095, 4096)
    )
    assert odd.compute_s == pytest.approx(even.compute_s, rel=0.002)
    model = {"preset": "gpt2", "vocab_size": 50_257}
    train = {"global_batch": 8, "seq_len": 1024, "precision": "bf16"}
    whole, padded = (
        get_step_timing(parse_fields({**fields, "model": {**model, "vocab_size": rows}, "train": train}), CLUSTER)
        for rows in (50_257, 50_304)
    )
    assert whole.compute_s > 1.2 * padded.compute_s, "logits are rows of the vocabulary's length"


def test_fp8_without_hardware_support_is_reported_as_planned_in_16_bits() -> None:
    spec = SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"precision": "fp8"})})
    told = {name: estimate(spec, CLUSTERS[name])["time"]["interval"]["words"] for name in ("a100-80gb", "h100")}
    assert "16-bit matmuls because A100 80GB lacks fp8" in told["a100-80gb"]
    assert "16 bits" not in told["h100"]


def test_matmul_without_fp8_hardware_runs_as_in_16_bits() -> None:
    chip, product = CLUSTERS["a100-80gb"].accelerator, Gemm(4096, 4096, 4096)
    assert compute_gemm_seconds(product, chip, "fp8", 2) == compute_gemm_seconds(product, chip, "bf16", 2)


@pytest.mark.parametrize(
    ("degree", "stride", "per_node", "world", "nodes"),
    [
        (6, 1, 8, 12, 2),  # the second of two groups has ranks 6 to 11
        (2, 6, 8, 12, 2),
        (6, 1, 8, 6, 1),
        (4, 1, 8, 64, 1),
        (8, 8, 8, 64, 8),
        (64, 1, 72, 128, 1),  # racks are allocated in blocks of 64
        (2, 64, 72, 128, 2),
        (72, 1, 72, 144, 1),
        (9, 8, 72, 144, 1),
    ],
)
def test_node_span_is_that_of_the_worst_group(degree: int, stride: int, per_node: int, world: int, nodes: int) -> None:
    assert get_node_span(degree, stride, per_node, world).nodes == nodes


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8]))
def test_node_span_equals_count_over_the_ranks(degree: int, stride: int, blocks: int, per_node: int) -> None:
    whole = degree * stride
    groups = [range(b * whole + o, (b + 1) * whole + o, stride)[:degree] for b in range(blocks) for o in range(stride)]
    wanted = max(len({rank // per_node for rank in ranks}) for ranks in groups)
    assert get_node_span(degree, stride, per_node, blocks * whole).nodes == wanted


@pytest.mark.parametrize(
    ("device", "gib", "link_gb_s", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 39, 300, 312e12),
        ("NVIDIA A100-PCIE-40GB", 39, 32, 312e12),
        ("NVIDIA A100 80GB PCIe", 79, 32, 312e12),
        ("Tesla V100-SXM2-16GB", 15, 150, 125e12),
        ("Tesla V100-PCIE-16GB", 15, 16, 112e12),
    ],
)
def test_pcie_card_ranks_communicate_over_the_bus(device: str, gib: int, link_gb_s: int, bf16: float) -> None:
    """A PCIe card has no NVLink: tensor ranks of Llama-2 7B take twice the time, and ZeRO-3 takes 3.7 times."""
    found = find_cluster(device, gib * 2**30)
    assert found is not None
    assert found.node.bytes_per_s == link_gb_s * 1e9
    assert found.accelerator.bf16_flops == pytest.approx(bf16)
    assert ("PCIe" in found.name) == (link_gb_s < 100)


def test_peak_is_assumed_only_for_cpus_and_unknown_gpus() -> None:
    assumed = {cluster.name for cluster in CLUSTERS.values() if cluster.has_assumed_peak}
    assert assumed == {cluster.name for cluster in CLUSTERS.values() if cluster.device == "cpu"} != set()
