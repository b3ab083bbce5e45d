"""Runs cases under torchrun and holds them against one process, the prediction, and the theoretical minimum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contracts.telemetry import Cell
from planner.layout import Coordinates, rank_of, stage_layers
from planner.models import parameter_count, stage_units
from planner.spec import JobSpec
from tests.parity.cases import Case, reference_spec

ROOT = Path(__file__).resolve().parents[2]
FP32_BYTES = 4
TOLERANCE = 1e-5


class Result(NamedTuple):
    """What a case showed. Differences are relative; `over_minimum` is measured over least algorithmic bytes."""

    case: Case
    loss_difference: float
    norm_difference: float
    gradient_difference: float
    wrong_bytes: int
    wrong_calls: int
    over_minimum: dict[str, float]

    @property
    def passed(self) -> bool:
        exact = self.wrong_bytes == 0 and self.wrong_calls == 0
        minimal = all(abs(ratio - 1) < 0.005 for ratio in self.over_minimum.values())
        largest = max(self.loss_difference, self.norm_difference, self.gradient_difference)
        return exact and minimal and largest < TOLERANCE


class Run(NamedTuple):
    """Losses and gradient norms by step, whole gradients of step 1 by name, each rank's items and counters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    items: list[list[dict[str, Any]]]
    cells: list[list[Cell]]


def run_all(cases: list[Case], work: Path) -> list[Result]:
    """Run every case, one torchrun a world size, and compare."""
    references = {case.arch: reference_spec(case.arch) for case in cases}
    specs = {f"reference {arch}": spec for arch, spec in references.items()}
    specs |= {case.label: case.spec for case in cases}
    runs = run_specs(specs, work)
    return [compare(case, runs[case.label], runs[f"reference {case.arch}"]) for case in cases]


def run_specs(specs: dict[str, JobSpec], work: Path) -> dict[str, Run]:
    by_world: dict[int, list[str]] = defaultdict(list)
    for label, spec in specs.items():
        by_world[spec.layout.world_size].append(label)
    runs = {}
    for world, labels in sorted(by_world.items()):
        out = work / f"world-{world}"
        entries = []
        for index, label in enumerate(labels):
            (out / str(index)).mkdir(parents=True)
            entries.append({"folder": str(index), "spec": specs[label].model_dump()})
        (out / "cases.json").write_text(json.dumps(entries))
        launch(world, out, work / "data")
        for index, label in enumerate(labels):
            runs[label] = load(specs[label], out / str(index))
    return runs


def launch(world: int, out: Path, data_root: Path) -> None:
    data_root.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    argv = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.parity.rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*argv, str(out), str(data_root)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"torchrun with {world} ranks ended with {done.returncode}:\n{done.stderr[-6000:]}")


def load(spec: JobSpec, folder: Path) -> Run:
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(spec.layout.world_size)]
    parts = [torch.load(folder / f"gradients-{rank}.pt") for rank in range(spec.layout.world_size)]
    steps = [item for item in said[0]["items"] if item["kind"] == "step"]
    return Run(
        losses=[item["loss"] for item in steps],
        norms=[item["grad_norm"] for item in steps],
        gradients=whole_gradients(spec, parts),
        items=[s["items"] for s in said],
        cells=[s["cells"] for s in said],
    )


def whole_gradients(spec: JobSpec, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the ranks' parts together: dp shards of dim 0 under ZeRO, then tp shards; copies must agree."""
    layout, whole = spec.layout, {}
    for stage, layers in enumerate(stage_layers(spec.model.num_layers, layout.pp)):
        for unit in stage_units(spec.model, layers, first=stage == 0, last=stage == layout.pp - 1):
            prefix = "" if unit.name == "root" else f"{unit.name}."
            for parameter in unit.parameters:
                name = prefix + parameter.name
                by_tp = []
                for tp in range(layout.tp):
                    ranks = [rank_of(Coordinates(pp=stage, dp=dp, tp=tp), layout) for dp in range(layout.dp)]
                    by_tp.append(joined([parts[r][name] for r in ranks], 0 if layout.zero else None))
                gradient = joined(by_tp, parameter.tp_dim)
                if name == "head.weight" and spec.model.tied_embeddings:
                    assert torch.equal(gradient, whole["embedding.weight"]), "tied copies differ"
                    continue
                whole[name] = gradient
    return whole


def joined(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    if dim is not None:
        return torch.cat(parts, dim)
    for part in parts[1:]:
        assert relative(part, parts[0]) < TOLERANCE, "replicas hold different gradients"
    return parts[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||"""
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-30))


def compare(case: Case, run: Run, reference: Run) -> Result:
    """Gradient norms are compared on their own: Adam hardly sees a wrong scale, so losses would not show one."""
    rows = [row for items in run.items for item in items if item["kind"] == "verdict" for row in item["rows"]]
    assert len([i for items in run.items for i in items if i["kind"] == "verdict"]) == case.spec.layout.world_size
    return Result(
        case=case,
        loss_difference=largest_difference(run.losses, reference.losses),
        norm_difference=largest_difference(run.norms, reference.norms),
        gradient_difference=gradient_difference(run.gradients, reference.gradients),
        wrong_bytes=sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        wrong_calls=sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
        over_minimum=over_minimum(case.spec, run.cells),
    )


def largest_difference(values: list[float], references: list[float]) -> float:
    """max |a - b| / |b|"""
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


def gradient_difference(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor.

    A key bias has no gradient but rounding (softmax does not change when all keys move together): it is held
    against the norm of all gradients.
    """
    assert gradients.keys() == reference.keys()
    whole = torch.cat([g.flatten() for g in reference.values()]).double().norm()
    differences = []
    for name, expected in reference.items():
        scale = whole if name.endswith("attention.k.bias") else expected.double().norm()
        differences.append(float((gradients[name] - expected).double().norm() / scale))
    return max(differences)


def over_minimum(spec: JobSpec, cells: list[list[Cell]]) -> dict[str, float]:
    """Algorithmic bytes of all ranks' steps over the least the theory allows, by axis that has any."""
    measured: dict[str, int] = defaultdict(int)
    for cell in (c for of_rank in cells for c in of_rank if c["phase"] == "step"):
        measured[cell["axis"]] += cell["algorithmic_bytes"]
    least = minimum(spec)
    assert {a for a in measured if measured[a] and a != "world"} == set(least)
    return {axis: measured[axis] / (least[axis] * spec.train.steps) for axis in least}


def minimum(spec: JobSpec) -> dict[str, float]:
    """Bytes all ranks together must send in a step, in closed form (costs: Megatron section 3, ZeRO section 7).

    Written without `planner.traffic`. P is the parameters of one dp replica; a tied table on two stages counts on
    each, as both must reduce it.
    """
    layout, model, train = spec.layout, spec.model, spec.train
    d, t, p, m = layout.dp, layout.tp, layout.pp, train.micro_batches
    bs = spec.micro_batch_size * train.seq_len
    bsh = bs * model.hidden_size
    table = model.vocab_size * model.hidden_size
    copies = p > 1 and model.tied_embeddings
    gpt = model.arch == "gpt"
    # What tp copies: norms, biases of the two row-parallel products, learned positions.
    norms = (2 * model.num_layers + 1) * model.hidden_size * (2 if gpt else 1)
    copied = norms + (2 * model.num_layers * model.hidden_size + model.max_seq_len * model.hidden_size) * gpt
    held = parameter_count(model) + table * copies + copied * (t - 1)  # over the t ranks of a replica
    least: dict[str, float] = {}
    if d > 1:
        units = {0: 2.0, 1: 2.0, 2: 1.0 + m, 3: 3.0 * m}[layout.zero]
        least["dp"] = d * units * (d - 1) / d * held
    if t > 1:
        layers = model.num_layers * 8 * bsh * (t - 1) / t
        embedding_and_head = 4 * bsh * (t - 1) / t
        loss = 3 * bs * 2 * (t - 1) / t
        least["tp"] = d * t * m * (layers + embedding_and_head + loss)
        if layout.sequence_parallel:
            least["tp"] += (t if layout.zero else d * t) * 2 * (t - 1) / t * copied
    if p > 1:
        parts = t if not layout.sequence_parallel else 1
        least["pp"] = d * parts * 2 * (p - 1) * m * bsh
        least["pp"] += 2 * table * (1 if layout.zero else d) * copies
    return {axis: size * FP32_BYTES for axis, size in least.items()}


def table_row(result: Result) -> str:
    ratios = " ".join(f"{axis} {ratio:.2f}" for axis, ratio in sorted(result.over_minimum.items()))
    verdict = "pass" if result.passed else "FAIL"
    differences = (result.loss_difference, result.norm_difference, result.gradient_difference)
    return (
        f"{result.case.label:34} {result.case.spec.layout.world_size:5} {' '.join(f'{d:10.1e}' for d in differences)} "
        f"{result.wrong_bytes:8} B {result.wrong_calls:6}  {ratios:24} {verdict}"
    )


HEADER = (
    f"{'layout':34} {'ranks':>5} {'loss diff':>10} {'norm diff':>10} {'grad diff':>10} {'wrong':>10} {'calls':>6}  "
    f"{'over minimum':24} verdict"
)
