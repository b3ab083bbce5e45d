"""Compare step times of the planner with published ones, and measure the speed of the search.

    python -m benchmarks.planner [--vtrain-multi ground_truth_multi.csv]

Zero-shot means that no constant was fitted on the rows of the table. The two efficiencies of the accelerator are fitted
on the other table, and for vTrain on both. A fit on vTrain's rows uses one half and is tested on the other half. The
vTrain table with several nodes is data/ground_truth_multi.csv of VIA-Research/vTrain.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

from planner.cost.timing import Timer
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec, TrainSpec
from planner.hardware.catalog import ACCELERATORS, CLUSTERS
from planner.hardware.cluster import Cluster
from planner.search.layout_search import Constraints, search
from tests.planner.rows.published import Row, korthikanti_table_5, megatron_table_1, vtrain_multi_rows, vtrain_rows

GRID = {
    "gemm_efficiency": [0.70 + 0.01 * i for i in range(15)],
    "memory_efficiency": [0.55 + 0.05 * i for i in range(8)],
}
VTRAIN_GRID = {
    "gemm_efficiency": [0.55, 0.62, 0.7, 0.78],
    "memory_efficiency": [0.6, 0.7, 0.8],
    "launch_s": [90e-6, 95e-6, 100e-6, 105e-6, 110e-6],
    "node_efficiency": [0.3, 0.4, 0.6, 0.8],
}


def replace_constants(cluster: Cluster, constants: dict[str, float]) -> Cluster:
    """Return the cluster with other constants of its accelerator, or of its node link (`node_efficiency`)."""
    rest = dict(constants)
    node = cluster.node
    if "node_efficiency" in rest:
        node = node.model_copy(update={"efficiency": rest.pop("node_efficiency")})
    accelerator = cluster.accelerator.model_copy(update=rest)
    return cluster.model_copy(update={"accelerator": accelerator, "node": node})


def compute_errors(rows: Iterable[Row], cluster: Cluster) -> list[float]:
    """Return signed relative errors of the step time."""
    timer = Timer(cluster)
    return [timer.get_step(row.spec).step_s / row.seconds - 1 for row in rows]


def fit_constants(rows: Sequence[Row], cluster: Cluster, grid: dict[str, list[float]]) -> Cluster:
    """Return the cluster with the constants of the grid that have the smallest mean error."""
    names = list(grid)
    choices = (replace_constants(cluster, dict(zip(names, values, strict=True))) for values in product(*grid.values()))
    return min(choices, key=lambda choice: mean(map(abs, compute_errors(rows, choice))))


def compute_layer_ratios(rows: Sequence[Row], cluster: Cluster) -> dict[tuple[int, ...], float]:
    """Return the median of measured over predicted time for each (hidden, tp, micro-batch)."""
    ratios: dict[tuple[int, ...], list[float]] = {}
    for row, off in zip(rows, compute_errors(rows, cluster), strict=True):
        ratios.setdefault(get_layer_shape(row), []).append(1 / (1 + off))
    return {key: median(values) for key, values in ratios.items()}


def get_layer_shape(row: Row) -> tuple[int, ...]:
    return row.spec.model.hidden_size, row.spec.layout.tp, row.spec.micro_batch_size


def print_errors(label: str, off: Sequence[float], rows: Sequence[Row], claim: str = "") -> None:
    size = [abs(x) for x in off]
    worst = max(range(len(off)), key=lambda i: size[i])
    print(
        f"{label:<58} {len(off):>5} {mean(size):>7.1%} {median(size):>7.1%} {off[worst]:>+7.1%}"
        f"  {rows[worst].label:<34} {claim}"
    )


TABLE_HEADER = f"{'step time against published':<58} {'rows':>5} {'mean':>7} {'median':>7} {'worst':>7}  worst row"


def print_vtrain(multi: Path | None) -> None:
    """Print errors on vTrain's rows. Those with several nodes come from a file."""
    print(TABLE_HEADER)
    _print_vtrain_tables(list(vtrain_rows()), multi)
    if multi is None:
        where = "data/ground_truth_multi.csv of github.com/VIA-Research/vTrain"
        print(f"vTrain, several nodes: use --vtrain-multi FILE to read {where}")


def _print_vtrain_tables(single: Sequence[Row], multi: Path | None) -> None:
    if multi:
        several, big = list(vtrain_multi_rows(multi)), CLUSTERS["a100-80gb"]
        network = big.network.model_copy(update={"bytes_per_s": 800e9 / 8 / big.per_node})  # 4 x 200 Gb/s a node
        off = compute_errors(several, big.model_copy(update={"network": network}))
        print_errors("vTrain several nodes, no constant fitted", off, several, "vTrain claims 14.7% over several")
    off = compute_errors(single, CLUSTERS["a100-40gb"])
    print_errors("vTrain one node, zero-shot", off, single, "vTrain claims 8.4% on one node")


def print_accuracy(vtrain_multi: Path | None) -> None:
    megatron, korthikanti, vtrain = megatron_table_1(), korthikanti_table_5(), list(vtrain_rows())
    big = CLUSTERS["a100-80gb"]
    small = CLUSTERS["a100-40gb"]
    print(TABLE_HEADER)
    calculon = "Calculon claims 3.65% mean, 8.87% worst"
    print_errors("Megatron table 1, constants as shipped", compute_errors(megatron, big), megatron, calculon)
    other = fit_constants(korthikanti, big, GRID)
    print_errors("Megatron table 1, zero-shot (fitted on Korthikanti)", compute_errors(megatron, other), megatron)
    print_errors("Korthikanti table 5, constants as shipped", compute_errors(korthikanti, big), korthikanti)
    other = fit_constants(megatron, big, GRID)
    print_errors("Korthikanti table 5, zero-shot (fitted on Megatron)", compute_errors(korthikanti, other), korthikanti)
    _print_vtrain_tables(vtrain, vtrain_multi)
    random.Random(0).shuffle(vtrain)
    train, test = vtrain[: len(vtrain) // 2], vtrain[len(vtrain) // 2 :]
    host = fit_constants(train[::3], small, {"launch_s": VTRAIN_GRID["launch_s"]})
    print_errors("vTrain, host's launch time fitted on the other half", compute_errors(test, host), test)
    fitted = fit_constants(train[::6], small, VTRAIN_GRID)
    print_errors("vTrain, four constants fitted on the other half", compute_errors(test, fitted), test)
    factors = compute_layer_ratios(train, fitted)
    off = [
        (1 + e) * factors[get_layer_shape(row)] - 1 for row, e in zip(test, compute_errors(test, fitted), strict=True)
    ]
    print_errors(f"vTrain, and {len(factors)} layer shapes measured on the other half", off, test)
    a = fitted.accelerator
    print(
        f"  fitted: gemm {a.gemm_efficiency}, memory {a.memory_efficiency}, launch {a.launch_s * 1e6:.0f} us,"
        f" node link {fitted.node.efficiency}; shipped: {small.accelerator.gemm_efficiency},"
        f" {small.accelerator.memory_efficiency}, {small.accelerator.launch_s * 1e6:.0f} us, {small.node.efficiency}"
    )


def print_search_speed() -> None:
    print(f"\n{'search':<58} {'considered':>10} {'fit':>7} {'seconds':>8}")
    for preset, cluster, world, batch, seq in (
        ("llama3-405b", "h100", 16384, 2048, 8192),
        ("megatron-1t", "a100-80gb", 3072, 3072, 2048),
        ("mixtral-8x7b", "h100", 128, 1024, 4096),
        ("llama3-8b", "h200", 64, 512, 8192),
    ):
        train = TrainSpec(global_batch=batch, seq_len=seq, precision="bf16")
        spec = JobSpec(model=PRESETS[preset].model, train=train)
        result = search(spec, CLUSTERS[cluster], Constraints(world))
        label = f"{preset} on {world:,} x {ACCELERATORS[CLUSTERS[cluster].accelerator.name].name}"
        print(f"{label:<58} {result.considered:>10,} {result.fitting:>7,} {result.seconds:>8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="step times against published ones, and the search's time")
    parser.add_argument("--vtrain-multi", type=Path, metavar="FILE", help="vTrain's ground_truth_multi.csv")
    print_accuracy(parser.parse_args().vtrain_multi)
    print_search_speed()
