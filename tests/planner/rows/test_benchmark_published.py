"""Benchmark of published rows: columns become specs, and a source has no influence on its own prediction."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.published.__main__ import hold_out, plan_times, read_files
from benchmarks.published.columns import RowSpec, identify_stack, read_columns
from benchmarks.published.fit import Fit
from benchmarks.published.rows import PublishedRow, SkipError, read_rows

ROW = {
    "source_repo_path": "Aleph-Alpha/layouts:runs.xlsx",
    "gpu": "A100-SXM4-80GB",
    "gpus": "64",
    "model": "llama-13b",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "kv_heads": "40",
    "ffn": "13824",
    "vocab": "128000",
    "seq": "2048",
    "global_batch": "2048",
    "micro_batch": "1",
    "tp": "2",
    "pp": "1",
    "vpp": "1",
    "dp": "32",
    "cp": "1",
    "ep": "1",
    "zero": "1",
    "recompute": "none",
    "precision": "bf16",
    "measure_name": "step_time_s",
    "measure_value": "26.4",
    "step_time_s": "26.4",
    "tier": "A",
    "note": "attention kernel flash_attention2; sequence parallel off",
}


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
    return path


def read_row(path: Path, **columns: str) -> PublishedRow:
    (row,) = read_rows(write_rows(path / "rows.csv", columns))
    assert isinstance(row, PublishedRow)
    return row


def plan_row(path: Path, **columns: str) -> RowSpec:
    return read_columns(read_row(path, **columns), "unknown")


def test_every_row_is_planned_or_counted_with_its_reason(tmp_path: Path) -> None:
    rows = [
        {},
        {"gpu": "TPU v5e"},
        {"measure_name": "loss"},
        {"measure_value": "none"},
        {"heads": "7"},
        {"model": "nemotron-h mamba"},
        {"global_batch": ""},
        {"tp": "3"},
        {"note": "LoRA of all layers"},
        {"measure_name": "out_of_memory", "measure_value": "1"},
    ]
    found, skipped = read_files([write_rows(tmp_path / "rows.csv", *rows)])
    timed = plan_times(found, skipped)
    assert len(timed) == 1
    assert {reason for _, reason in skipped} == {
        "no such accelerator: TPU v5e",
        "measures loss",
        "measurement is not a positive number",
        "hidden is not a multiple of heads",
        "layers without attention (Mamba)",
        "no global_batch",
        "heads cannot be divided so",
        "adapters with frozen weights",
    }


def test_spec_has_the_layout_and_batch_of_the_columns(tmp_path: Path) -> None:
    spec, cluster, scale = plan_row(tmp_path)
    layout, train = spec.layout, spec.train
    assert (layout.dp, layout.tp, layout.pp, layout.zero, layout.sequence_parallel) == (32, 2, 1, 1, False)
    assert (train.global_batch, train.micro_batches, train.seq_len, train.attention) == (2048, 64, 2048, "fused")
    assert (cluster.accelerator.name, scale, spec.resources.stack) == ("A100 80GB", 1.0, "unknown")


@pytest.mark.parametrize(
    ("columns", "attention", "sharded"),
    [
        ({"note": ""}, "fused", True),
        ({"note": "attention kernel torch; sequence parallel off"}, "unfused", False),
        ({"model": "bloom-176b", "kv_heads": ""}, "unfused", False),
    ],
)
def test_note_sets_the_attention_kernel_and_sequence_parallelism(
    tmp_path: Path, columns: dict[str, str], attention: str, sharded: bool
) -> None:
    spec = plan_row(tmp_path, **columns).spec
    assert (spec.train.attention, spec.layout.sequence_parallel) == (attention, sharded)


def test_unstated_recompute_is_the_lightest_that_may_fit(tmp_path: Path) -> None:
    small = plan_row(tmp_path, recompute="unknown").spec
    long = plan_row(tmp_path, recompute="unknown", seq="65536", global_batch="64").spec
    assert (small.layout.recompute, long.layout.recompute) == ("none", "full")


def test_network_of_a_node_is_read_from_the_note(tmp_path: Path) -> None:
    named = plan_row(tmp_path, note="8 AWS p3.16xlarge").cluster
    slow = plan_row(tmp_path, gpu="V100-SXM2-16GB x1 a node", note="network 5 ms, 2 Gb/s", vocab="50304").cluster
    assert named.network.bytes_per_s == pytest.approx(25e9 / 8 / 8)
    assert (slow.per_node, slow.network.bytes_per_s) == (1, pytest.approx(2e9 / 8))


def test_indivisible_batch_is_rounded_up_and_scaled(tmp_path: Path) -> None:
    spec, _, scale = plan_row(tmp_path, global_batch="2040")
    assert (spec.train.global_batch, scale) == (2048, 2040 / 2048)


def test_mixture_of_a_known_name_has_its_experts(tmp_path: Path) -> None:
    columns = {"model": "mixtral-8x7b", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "ep": "8"}
    moe = plan_row(tmp_path, **columns).spec.model.moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token) == (8, 2)
    with pytest.raises(SkipError, match="unknown number of experts"):
        plan_row(tmp_path, **{**columns, "model": "our-moe"})


def test_software_is_known_only_if_the_publication_names_it(tmp_path: Path) -> None:
    assert identify_stack(read_row(tmp_path)) == "scaling"
    assert identify_stack(read_row(tmp_path, source_repo_path="someone/else:results.md")) == "unknown"


def write_sources(path: Path, slow: str) -> Path:
    """Write rows of three sources, of which the last takes `slow` seconds per step."""
    sources = {"one/a": "26.4", "two/b": "20", "three/c": slow}
    rows = [
        {"source_repo_path": f"{source}:x", "measure_value": seconds, "step_time_s": seconds, "tp": tp, "dp": dp}
        for source, seconds in sources.items()
        for tp, dp in (("2", "32"), ("4", "16"))
    ]
    return write_rows(path / "rows.csv", *rows)


def test_prediction_of_a_source_does_not_depend_on_its_own_rows(tmp_path: Path) -> None:
    """The others change with them, so the fit does use the rows."""
    found = []
    for slow in ("22", "60"):
        rows, skipped = read_files([write_sources(tmp_path, slow)])
        timed = plan_times(rows, skipped)
        fit = Fit([measured for _, measured in timed])
        held_out = hold_out(timed, fit, lambda row: row.source)
        found.append({(one.row.source, one.row.text("tp")): one.estimate.seconds for one in held_out})
    first, second = found
    assert first["three/c", "2"] == second["three/c", "2"]
    assert first["one/a", "2"] < second["one/a", "2"]


def test_rows_with_contradictions_and_old_accelerators_are_not_fitted(tmp_path: Path) -> None:
    rows, skipped = read_files(
        [write_rows(tmp_path / "rows.csv", {}, {"tier": "C"}, {"gpu": "V100-SXM2-32GB", "vocab": "50304"})]
    )
    fitted = Counter(measured.is_fitted for _, measured in plan_times(rows, skipped))
    assert fitted == {True: 1, False: 2}
