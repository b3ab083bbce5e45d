"""Format estimates, searches, and explanations for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.cost.estimate import Estimate, get_traffic_kind
from planner.explain import Explanation
from planner.facts.placements import get_padded_vocab_size
from planner.facts.spec import JobSpec
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.search.layout_search import LayoutSearchResult, compute_margins
from planner.search.neighbors import Neighbor

GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    """Format bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def format_traffic(num_bytes: float) -> str:
    """Format bytes with a decimal unit, as the pages show traffic."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def format_duration(seconds: float) -> str:
    """Format seconds as s, ms, or us."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def format_estimate(spec: JobSpec, made: Estimate, advice: Sequence[Neighbor]) -> str:
    """Return memory, traffic, and step time of a layout as text."""
    where, timed = made["cluster"], made["time"]
    axes = " x ".join(f"{axis} {degree}" for axis, degree in made["axes"].items() if axis != "ep")
    ranks = "1 rank" if made["world_size"] == 1 else f"{made['world_size']:,} ranks"
    lines = [
        f"{spec.model.preset or 'custom model'}: {made['model_parameters']:,} parameters{_padded(made)}",
        f"{ranks} ({axes}) on {where['nodes']:,} x {where['per_node']} {where['accelerator']}",
        f"micro-batch {format_count(made['micro_batch_size'], 'sequence')} x {made['micro_batches']},"
        f" {made['tokens_per_step']:,} tokens per step",
        "",
        f"memory  {format_bytes(made['peak_memory_bytes'])} of {format_bytes(where['memory_bytes'])}"
        f" on the fullest rank (estimate: {made['memory_interval']['words']}){_fitting(made)}",
    ]
    fullest = max(made["stages"], key=lambda stage: stage["memory_bytes"])
    lines += [f"  {name:<12} {format_bytes(value):>12}" for name, value in fullest["memory"].items() if value]
    if host_bytes := made.get("host_memory_bytes"):
        lines.append(f"  {'CPU memory':<12} {format_bytes(host_bytes):>12}")
    if spec.memory is not None:
        lines.append("  memory options change memory only; traffic and time: AdamW on all weights, no offload")
    lines += [f"  try {n.change}: {n.reason}" for n in advice]
    lines += ["", f"traffic  payload per rank of stage {fullest['stage']} and step ({get_traffic_kind(spec)})"]
    if fullest["padded_share"] >= 0.0005:
        lines.append(f"  padding of uneven ZeRO shards adds {fullest['padded_share']:.1%}")
    for row in fullest["traffic"]:
        group = f"{row['axis']} of {row['group_size']}"
        crossing = "between nodes" if row["between_nodes"] else "inside a node"
        op = row["op"].replace("_", "-")
        calls = f"{row['count']:,} {'call ' if row['count'] == 1 else 'calls'}"
        lines.append(f"  {group:<12} {op:<15} {calls:>15} {format_traffic(row['payload_bytes']):>12}  {crossing}")
    lines += ["", f"time  {format_duration(timed['step_s'])} per step (estimate: {timed['interval']['words']})"]
    lines += [f"  {part['name']:<12} {format_duration(part['seconds']):>12}" for part in timed["parts"]]
    if aligned := made.get("aligned_vocabulary"):
        saving = format_duration(aligned["spares_s"])
        lines.append(f"  a vocabulary of {aligned['vocab_size']:,} tokens would save {saving} per step")
    lines.append(
        f"  MFU {timed['mfu']:.1%}  HFU {timed['hfu']:.1%}  {timed['tokens_per_s']:,.0f} tokens/s"
        f"  {1e12 / timed['tokens_per_s'] / 86400:,.1f} days for 1e12 tokens"
    )
    return "\n".join(lines)


def _fitting(made: Estimate) -> str:
    if not made["fits"]:
        return "  might fit" if made.get("may_fit") else "  does not fit"
    return "  might not fit" if made.get("tight") else ""


def _padded(made: Estimate) -> str:
    vocab, padded = made["vocab_size"], made["padded_vocab_size"]
    if vocab == padded:
        return ""
    return f", vocabulary {vocab:,} padded to {padded:,} for tp {made['axes']['tp']}"


def _padded_by(vocab: int, degrees: Sequence[int]) -> list[str]:
    """Return a line about the tensor parallel degrees that pad the vocabulary."""
    to = [f"{padded:,} for tp {tp}" for tp in degrees if (padded := get_padded_vocab_size(vocab, tp)) != vocab]
    return [f"vocabulary {vocab:,} is padded to {', '.join(to)}"] if to else []


def format_search(result: LayoutSearchResult, near: Sequence[Neighbor], cluster: Cluster) -> str:
    """Return the best layouts, and the layouts with one change from the first, as text."""
    lines = [
        f"{result.considered:,} layouts considered in {result.seconds:.2f} s, {result.fitting:,} fit {cluster.name}",
        *(f"  refused {count:,}: {reason}" for reason, count in sorted(result.refused.items())),
        "",
        f"{'step':>10} {'MFU':>6} {'memory':>10}  tp  cp  pp    dp  ep zero  b    m  schedule, recompute",
    ]
    sure = compute_margins(result.best, cluster)
    for f in result.best:
        x = f.spec.layout
        chunks = f" x {x.virtual_stages}" if x.virtual_stages > 1 else ""
        schedule = f"{x.schedule}{chunks}" if x.pp > 1 else "-"
        lines.append(
            f"{format_duration(f.timing.step_s):>10} {f.timing.mfu:>6.1%} {format_bytes(f.memory_bytes):>10}"
            f" {x.tp:>3} {x.cp:>3} {x.pp:>3} {x.dp:>5} {x.ep:>3} {x.zero:>4}"
            f" {f.spec.micro_batch_size:>2} {f.spec.train.micro_batches:>4}  {schedule}, {x.recompute}"
        )
    if sure:
        lines += [
            "",
            f"margin of error of the first layout: time {sure[0].time['words']}; memory {sure[0].memory['words']}",
        ]
        lines += _padded_by(result.best[0].spec.model.vocab_size, sorted({f.spec.layout.tp for f in result.best}))
    else:
        lines.append("no layout fits")
    if near:
        lines += ["", "layouts with one change from the first layout:"]
        lines += [f"  {n.change:<24} {n.reason}" for n in near]
    return "\n".join(lines)


def format_auto(auto_layout: Mapping[str, Any]) -> str:
    """Return the chosen layout, the reason, and the runners-up as text."""
    lines = [auto_layout["why"], ""]
    lines += [
        f"  {other['words']:<64} {format_duration(other['step_s']):>10}  {other['slower']:>+10.1%}"
        f"  {format_bytes(other['memory_bytes']):>10}  {other['heavier']:>+12.1%}"
        for other in auto_layout["runners_up"]
    ]
    if auto_layout["runners_up"]:
        lines.insert(2, f"  {'runners-up':<64} {'step time':>10}  extra time  {'memory':>10}  extra memory")
    return "\n".join(lines)


def format_explanations(explanations: Sequence[Explanation]) -> str:
    """Return each term with its formula, its numbers, and its source."""
    lines: list[str] = []
    for e in explanations:
        whose = "" if e["stage"] is None else f" of a rank of stage {e['stage']}"
        format_size = format_traffic if e["figure"] == "traffic" else format_bytes
        lines += [f"{e['figure']}{whose} = {_value(e['value'], e['unit'], format_size)}  ({e['kind']})"]
        for term in e["terms"]:
            lines.append(
                f"  {term['name']:<34} {_value(term['value'], term['unit'], format_size):>16}  {term['formula']}"
            )
            if term["numbers"]:
                lines.append(f"  {'':<34} {'':>16}  = {term['numbers']}")
            lines.append(f"  {'':<34} {'':>16}  {term['source']}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _value(value: float, unit: str, format_bytes: Callable[[float], str]) -> str:
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_duration(value)
    if unit == "":
        return f"{value:.1%}"
    return f"{value:.4g} {unit}" if isinstance(value, float) else f"{value:,} {unit}"
