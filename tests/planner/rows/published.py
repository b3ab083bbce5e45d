"""Published measurements of training runs, and specs that describe the runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, Layout, ModelSpec, Recompute, TrainSpec

DATA = Path(__file__).parent / "data" / "vtrain_a100_single_node.csv"


class Row(NamedTuple):
    """Store the layout of a run and the seconds per iteration."""

    label: str
    spec: JobSpec
    seconds: float


def gpt(layers: int, hidden: int, heads: int, *, seq_len: int = 2048) -> ModelSpec:
    """Return a GPT with Megatron's padded vocabulary."""
    return ModelSpec(
        arch="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=51200,
        max_seq_len=seq_len,
        tied_embeddings=True,
    )


def megatron_run(
    model: ModelSpec,
    *,
    tp: int,
    pp: int,
    chunks: int,
    micro_batch: int,
    gpus: int,
    batch: int,
    recompute: Recompute = "full",
    sequence_parallel: bool = False,
) -> JobSpec:
    """Return a run of Megatron-LM from 2104.04473 (scatter-gather) or 2205.05198 (sequence parallelism)."""
    dp = gpus // (tp * pp)
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        virtual_stages=chunks,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        regather=sequence_parallel,
        scatter_gather=pp > 1 and not sequence_parallel,
    )
    train = TrainSpec(
        global_batch=batch,
        micro_batches=batch // (dp * micro_batch),
        seq_len=model.max_seq_len,
        precision="bf16",
        attention="unfused",
        dropout=True,
        overlap=False,
    )
    return JobSpec(model=model, layout=layout, train=train, resources=SOFTWARE)


SOFTWARE = Resources(device="cuda", stack="megatron_2021")

# 2104.04473 table 1: name, layers, hidden, heads, tp, pp, chunks, micro-batch, GPUs, batch, TFLOP/s per GPU
_MEGATRON = (
    ("1.7B", 24, 2304, 24, 1, 1, 1, 16, 32, 512, 137),
    ("7.5B", 36, 4096, 32, 4, 1, 1, 16, 128, 512, 142),
    ("39.1B", 48, 8192, 64, 8, 2, 1, 4, 512, 1536, 138),
    ("145.6B", 80, 12288, 96, 8, 8, 2, 2, 1536, 2304, 148),
    ("529.6B", 105, 20480, 128, 8, 35, 3, 1, 2520, 2520, 163),
    ("1008B", 128, 25600, 160, 8, 64, 1, 1, 3072, 3072, 163),
)

# 2205.05198 tables 3 and 5: name, layers, hidden, heads, tp, pp, chunks, micro-batch, GPUs, batch, s full, s selective
_KORTHIKANTI = (
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 8, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 3, 1, 64, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, 8, 35, 3, 1, 280, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, 8, 64, 1, 1, 512, 512, 94.42, 71.49),
)


def megatron_table_1() -> list[Row]:
    """Compute iteration seconds from the published TFLOP/s by equation 3 of the paper."""
    rows = []
    for name, layers, h, heads, tp, pp, chunks, micro_batch, gpus, batch, tflops in _MEGATRON:
        model = gpt(layers, h, heads)
        spec = megatron_run(model, tp=tp, pp=pp, chunks=chunks, micro_batch=micro_batch, gpus=gpus, batch=batch)
        flops = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        rows.append(Row(name, spec, flops / (gpus * tflops * 1e12)))
    return rows


def korthikanti_table_5() -> list[Row]:
    """Return runs with full recompute and tensor parallelism, and with selective recompute and sequence parallelism."""
    rows = []
    for name, layers, h, heads, tp, pp, chunks, micro_batch, gpus, batch, full_s, selective_s in _KORTHIKANTI:
        for recompute, seconds in (("full", full_s), ("selective", selective_s)):
            spec = megatron_run(
                gpt(layers, h, heads),
                tp=tp,
                pp=pp,
                chunks=chunks,
                micro_batch=micro_batch,
                gpus=gpus,
                batch=batch,
                recompute="full" if recompute == "full" else "selective",
                sequence_parallel=recompute == "selective",
            )
            rows.append(Row(f"{name} {recompute}", spec, seconds))
    return rows


def vtrain_rows() -> Iterator[Row]:
    """Return 1,440 runs on up to 8 A100 of one node (vTrain, MICRO 2024, data under the MIT license)."""
    for gpus, batch, micro_batch, h, heads, layers, s, tp, dp, pp, seconds in _vtrain_table(DATA):
        train = _vtrain_training(batch // (dp * micro_batch), batch, s)
        label = f"h {h} l {layers} tp {tp} dp {dp} pp {pp} b {micro_batch} of {gpus}"
        layout = Layout(dp=dp, pp=pp, tp=tp)
        model = gpt(layers, h, heads, seq_len=s)
        yield Row(label, JobSpec(model=model, layout=layout, train=train, resources=SOFTWARE), seconds)


def vtrain_multi_rows(path: Path) -> Iterator[Row]:
    """Return runs of 3.6 to 175 B parameters on 64 to 512 A100.

    The data is `data/ground_truth_multi.csv` of vTrain's repository. The runs use Megatron-DeepSpeed with full
    recompute. Tensor ranks divide the activations sent to the next stage.
    """
    for _, batch, micro_batch, h, heads, layers, s, tp, dp, pp, seconds in _vtrain_table(path):
        train = _vtrain_training(batch // (dp * micro_batch), batch, s).model_copy(update={"overlap": False})
        layout = Layout(dp=dp, pp=pp, tp=tp, recompute="full", scatter_gather=pp > 1 and tp > 1)
        model = gpt(layers, h, heads, seq_len=s)
        label = f"h {h} tp {tp} dp {dp} pp {pp} b {micro_batch}"
        yield Row(label, JobSpec(model=model, layout=layout, train=train, resources=SOFTWARE), seconds)


def _vtrain_table(path: Path) -> Iterator[tuple[int, int, int, int, int, int, int, int, int, int, float]]:
    """Read the last columns of each row: GPUs, batch, micro-batch, model sizes, degrees and seconds."""
    with path.open(encoding="utf-8-sig") as file:
        for row in list(csv.reader(file))[1:]:
            gpus, batch, micro_batch, h, heads, layers, s, tp, dp, pp = (int(value) for value in row[-11:-1])
            yield gpus, batch, micro_batch, h, heads, layers, s, tp, dp, pp, float(row[-1]) / 1e3


def _vtrain_training(micro_batches: int, batch: int, seq_len: int) -> TrainSpec:
    return TrainSpec(
        global_batch=batch,
        micro_batches=micro_batches,
        seq_len=seq_len,
        precision="bf16_gradients",
        attention="unfused",
        dropout=True,
    )
