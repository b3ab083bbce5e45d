"""`python -m workers.dry_run --spec FILE --ranks 0,17`: what ranks of a layout would send, keep and compute."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from contracts.telemetry.results import DryRunItem, VerdictItem, VerdictRow
from contracts.telemetry.steps import PhaseItem
from planner.cost.memory import gradient_bytes, memory
from planner.facts.layout import coordinates
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import not_runnable
from planner.facts.validation import SpecError
from workers.dry_run.rank import DryStep, dry_step
from workers.meter import Exporter, Recorder
from workers.meter.ending import end_as, fail
from workers.trainer.errors import UserError
from workers.trainer.traffic_check import step_verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.dry_run", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file with the job spec")
    parser.add_argument("--ranks", help="comma-separated ranks; default dry_ranks of the spec")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank")
    parser.add_argument("--job", default="local")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--telemetry", help="Unix socket of the supervisor")
    options = parser.parse_args()
    try:
        spec = _spec(options.spec, options.ranks)
    except (UserError, SpecError) as error:
        return fail(str(error), 2)
    exporter = Exporter(Recorder(0), options.telemetry, options.job, options.attempt) if options.telemetry else None
    wrong = 0
    try:
        if exporter is not None:
            exporter.send(PhaseItem(kind="phase", rank=0, time=time.time(), phase="step"))
        for rank in spec.dry_ranks:
            item, rows = _tried(spec, dry_step(spec, rank))
            wrong += _off(rows)
            _print(spec, item, rows, as_json=options.json)
            if exporter is not None:
                exporter.send(VerdictItem(kind="verdict", rank=rank, time=time.time(), rows=rows))
                exporter.send(item)
    finally:
        if exporter is not None:
            exporter.close()
    return fail(f"{wrong} of the collectives above differ from the prediction", 1) if wrong else 0


def _tried(spec: JobSpec, step: DryStep) -> tuple[DryRunItem, list[VerdictRow]]:
    parts = memory(spec, coordinates(step.rank, spec.layout).pp)
    item = DryRunItem(
        kind="dry_run",
        rank=step.rank,
        time=time.time(),
        parameters=step.parameters,
        peak_bytes=step.peak_bytes,
        optimizer_bytes=step.optimizer_bytes,
        predicted_bytes=sum(parts.values()),
        memory=step.memory,
        flops=step.flops,
        seconds=step.seconds,
    )
    return item, step_verdict(spec, step.rank, step.cells, {"step": step.received_rows})


def _off(rows: list[VerdictRow]) -> int:
    return sum((r["predicted_bytes"], r["predicted_count"]) != (r["measured_bytes"], r["measured_count"]) for r in rows)


def _print(spec: JobSpec, item: DryRunItem, rows: list[VerdictRow], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**item, "collectives": rows}), flush=True)
        return
    where = " ".join(f"{axis} {index}" for axis, index in coordinates(item["rank"], spec.layout)._asdict().items())
    print(f"rank {item['rank']} of {spec.layout.world_size} ({where}), computed in {item['seconds']:.1f} s")
    print(f"  {'keeps':<30}{item['parameters']:>24,} parameters")
    print(f"  {'most at once, with moments':<30}{item['peak_bytes'] + item['optimizer_bytes']:>24,} B")
    print(f"  {'the planner estimates':<30}{item['predicted_bytes']:>24,} B")
    for words, found, planned in _memory(spec, item):
        print(f"  {words:<30}{found:>24,} B  {planned:,} B planned")
    print(f"  {'products':<30}{item['flops']:>24,} FLOP")
    for row in rows:
        name = f"{row['axis']} {row['op']}, {row['measured_count']:,} calls"
        wanted = f"WRONG: {row['predicted_count']:,} calls, {row['predicted_bytes']:,} B predicted"
        print(f"  {name:<30}{row['measured_bytes']:>24,} B  {wanted if _off([row]) else 'as predicted'}")
    sys.stdout.flush()


def _memory(spec: JobSpec, item: DryRunItem) -> Iterator[tuple[str, int, int]]:
    """What is counted of it to the byte, in words, and what was planned."""
    stage, told = coordinates(item["rank"], spec.layout).pp, item["memory"]
    planned = memory(spec, stage)
    yield "of these weights", told["parameters"], planned["parameters"]
    yield "moments, without fp32 weights", told["optimizer"], planned["optimizer"]
    yield "complete gradients", told["gradients"], gradient_bytes(spec, stage)


def _spec(path: Path, ranks: str | None) -> JobSpec:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which is not JSON: {error}.") from None
    if isinstance(content, dict):
        content["kind"] = "dry_run"
        if ranks is not None:
            content["dry_ranks"] = [int(r) if r.strip().isdigit() else r for r in ranks.split(",")]
    spec = parse_spec(content)
    if refused := not_runnable(spec):
        raise SpecError(refused)
    return spec


if __name__ == "__main__":
    end_as(main)
