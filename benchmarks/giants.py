"""Rank the layouts of published large runs in the results of the layout search, and explain the first result.

python -m benchmarks.giants
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources, StackName
from planner.facts.spec import AttentionKernel, JobSpec, Layout, ModelSpec, Precision, TrainSpec
from planner.hardware.catalog import CLUSTERS
from planner.search.layout_search import Constraints, FittingLayout, compute_needed_bytes, search

MAX_LAYOUTS = 10
BLOOM = PRESETS["gpt3-175b"].model.model_copy(
    update={"preset": None, "num_layers": 70, "hidden_size": 14336, "num_heads": 112, "num_kv_heads": 112}
    | {"ffn_hidden_size": 57344, "vocab_size": 250880}
)


class PublishedRun(NamedTuple):
    """A published run. The search includes layouts of `ranks` ranks. `batch` and `micro_batch` are in sequences."""

    name: str
    source: str
    model: ModelSpec
    cluster: str
    stack: StackName
    batch: int
    seq: int
    micro_batch: int
    layout: Layout
    precision: Precision = "bf16"
    attention: AttentionKernel = "fused"

    @property
    def spec(self) -> JobSpec:
        """Spec of the published run."""
        train = TrainSpec(
            global_batch=self.batch,
            micro_batches=self.batch // (self.layout.dp * self.micro_batch),
            seq_len=self.seq,
            precision=self.precision,
            attention=self.attention,
        )
        resources = Resources(device="cuda", stack=self.stack)
        return JobSpec(model=self.model, layout=self.layout, train=train, resources=resources)


_SP: dict[str, Any] = {"sequence_parallel": True, "regather": True}
PUBLISHED_RUNS = (
    PublishedRun(
        *("GPT-3 175B, 1,024 A100", "2205.05198 table 3", PRESETS["gpt3-175b"].model, "a100-80gb", "megatron_2021"),
        *(1536, 2048, 1, Layout(tp=8, pp=8, dp=16, recompute="selective", **_SP)),
        attention="unfused",
    ),
    PublishedRun(
        *("BLOOM 176B, 384 A100", "2211.05100 section 3.4", BLOOM, "a100-80gb", "deepspeed"),
        *(2048, 2048, 2, Layout(tp=4, pp=12, dp=8, zero=1, recompute="full")),
        attention="unfused",
    ),
    PublishedRun(
        *("Llama 3.1 8B, 64 H100", "NVIDIA dgxc-benchmarking", PRESETS["llama3-8b"].model, "h100", "megatron"),
        *(1024, 8192, 1, Layout(cp=2, dp=32, zero=1)),
    ),
    PublishedRun(
        *("Llama 3.1 70B, 64 H100", "NVIDIA dgxc-benchmarking", PRESETS["llama3-70b"].model, "h100", "megatron"),
        *(128, 8192, 1),
        Layout(tp=4, cp=2, pp=4, dp=2, zero=1, schedule="interleaved_1f1b", virtual_stages=4, **_SP),
    ),
    PublishedRun(
        *("Llama 3 405B, 16,384 H100", "2407.21783 table 4", PRESETS["llama3-405b"].model, "h100", "megatron_2021"),
        *(2048, 8192, 1),
        Layout(
            tp=8, pp=16, dp=128, zero=1, schedule="interleaved_1f1b", virtual_stages=4, recompute="selective", **_SP
        ),
    ),
    PublishedRun(
        *("Mixtral 8x7B, 128 H100", "NVIDIA NeMo", PRESETS["mixtral-8x7b"].model, "h100", "megatron"),
        *(256, 4096, 1),
        Layout(pp=4, dp=32, ep=8, zero=1, schedule="interleaved_1f1b", virtual_stages=4),
    ),
)


def find_rank_in_search(giant: PublishedRun, best: list[FittingLayout]) -> int | None:
    """Return the rank of the published degrees and micro-batch in the results, from 1."""
    wanted = _get_degrees(giant.spec)
    return next((i for i, found in enumerate(best, 1) if _get_degrees(found.spec) == wanted), None)


def _get_degrees(spec: JobSpec) -> tuple[int, ...]:
    x = spec.layout
    return x.tp, x.cp, x.pp, x.ep, spec.micro_batch_size


def list_time_parts(timing: Timing) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    named = {"compute": timing.compute_s, "recompute": timing.recompute_s, "launch": timing.launch_s}
    named |= {"bubble": timing.bubble_s, "optimizer": timing.optimizer_s}
    return named | {str(axis): seconds for axis, seconds in timing.exposed_s.items()}


def format_layout(spec: JobSpec) -> str:
    """Return the layout in one line."""
    x = spec.layout
    schedule = f" {x.schedule} v{x.virtual_stages}" if x.pp > 1 else ""
    return (
        f"tp{x.tp} cp{x.cp} pp{x.pp} dp{x.dp} ep{x.ep} ZeRO-{x.zero} b{spec.micro_batch_size} {x.recompute}{schedule}"
    )


def list_reasons(mine: Timing, theirs: Timing) -> str:
    """Return the parts that make a step faster, the largest first."""
    one, other = list_time_parts(mine), list_time_parts(theirs)
    gains = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in {*one, *other}}
    order = sorted(gains, key=lambda name: (-abs(gains[name]), name))
    return ", ".join(f"{name} {-gains[name] / theirs.step_s:+.1%}" for name in order[:4] if gains[name])


def _format_cost(timing: Timing, num_bytes: int) -> str:
    return f"{timing.step_s:7.2f} s  MFU {timing.mfu:.1%}  {num_bytes / 2**30:5.1f} GiB"


def main() -> None:
    for giant in PUBLISHED_RUNS:
        cluster, spec = CLUSTERS[giant.cluster], giant.spec
        result = search(spec, cluster, Constraints(spec.layout.world_size), limit=10**6)
        found, timing = find_rank_in_search(giant, result.best), Timer(cluster).get_step(spec)
        print(f"\n{giant.name} ({giant.source}): {result.considered:,} layouts in {result.seconds:.1f} s")
        print(f"  theirs  {_format_cost(timing, compute_needed_bytes(spec, cluster))}  {format_layout(spec)}")
        if not result.best:
            print("  nothing fits")
            continue
        first = result.best[0]
        print(f"  first   {_format_cost(first.timing, first.memory_bytes)}  {format_layout(first.spec)}")
        where = "not in the answer" if found is None else f"number {found} of {result.fitting:,}"
        gains = list_reasons(first.timing, timing) or "nothing: it is theirs"
        print(f"  their degrees and micro-batch: {where}; the first gains by {gains}")


if __name__ == "__main__":
    main()
