"""Run parity cases, and compare them with a single-process reference, the prediction, and the theoretical minimum."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contracts.telemetry.items import Cell
from planner.cost.memory import get_gradient_bytes, get_memory
from planner.facts.layout import Coordinates, get_coordinates, get_rank
from planner.facts.model_shapes import Parameter, count_parameters, is_key_or_value, is_vocabulary
from planner.facts.placements import get_placement
from planner.facts.spec import JobSpec
from planner.facts.stages import get_stage_chunks, get_stage_units
from tests.parity.cases import Case, reference_spec, write_data
from tests.support.ranks import run_ranks
from workers.trainer.model.decoder import get_full_name

FP32_BYTES = 4
TOLERANCE = 1e-5


class Result(NamedTuple):
    """Differences of a case. They are relative. `over_minimum` is measured over least algorithmic bytes."""

    case: Case
    loss_difference: float
    norm_difference: float
    gradient_difference: float
    wrong_bytes: int
    wrong_calls: int
    wrong_memory: int  # of tensors that can be counted: weights, gradients, optimizer state
    over_minimum: dict[str, float]
    proven: bool  # by the run itself

    @property
    def passed(self) -> bool:
        exact = self.wrong_bytes == 0 and self.wrong_calls == 0 and self.wrong_memory == 0
        minimal = all(abs(ratio - 1) < 0.005 for ratio in self.over_minimum.values())
        largest = max(self.loss_difference, self.norm_difference, self.gradient_difference)
        return exact and minimal and largest < TOLERANCE and self.proven


class Run(NamedTuple):
    """Losses and gradient norms by step, whole gradients of step 1 by name, and items and counters of each rank.

    `routed_rows` has the rows that routers sent to experts of other ranks in all steps.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    items: list[list[dict[str, Any]]]
    cells: list[list[Cell]]
    routed_rows: int


def run_all(cases: list[Case], work: Path) -> list[Result]:
    """Run all cases, with those of one world size in the same processes, and compare them."""
    specs = {f"reference {case.reference}": reference_spec(*case.reference) for case in cases}
    specs |= {case.label: case.spec for case in cases}
    runs = run_specs(specs, work)
    return [compare(case, runs[case.label], runs[f"reference {case.reference}"]) for case in cases]


class VerifiedRun(NamedTuple):
    """Traffic differences and the verification of a run in a precision whose gradients have no exact reference."""

    label: str
    wrong_bytes: int
    wrong_calls: int
    proof: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.wrong_bytes and not self.wrong_calls and has_passed(self.proof)


def verify_all(cases: list[Case], precision: str, work: Path) -> list[VerifiedRun]:
    """Run all cases in a precision, and return what the runs report about themselves."""
    specs = {case.label: case.make_spec(precision) for case in cases}
    verified = []
    for label, folder in launch_all(specs, work).items():
        items = [item for rank in read_ranks(specs[label], folder) for item in rank["items"]]
        rows = [row for item in items if item["kind"] == "verdict" for row in item["rows"]]
        wrong_bytes = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows)
        wrong_calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows)
        proof = [item for item in items if item["kind"] == "proof"][-1]
        verified.append(VerifiedRun(label, wrong_bytes, wrong_calls, proof))
    return verified


def run_specs(specs: dict[str, JobSpec], work: Path) -> dict[str, Run]:
    return {label: load(specs[label], folder) for label, folder in launch_all(specs, work).items()}


def launch_all(specs: dict[str, JobSpec], work: Path) -> dict[str, Path]:
    """Run all specs, and return the folder of each."""
    by_world: dict[int, list[str]] = defaultdict(list)
    for label, spec in specs.items():
        by_world[spec.layout.world_size].append(label)
    folders = {}
    for world, labels in sorted(by_world.items()):
        out = work / f"world-{world}"
        entries = []
        for index, label in enumerate(labels):
            (out / str(index)).mkdir(parents=True)
            entries.append({"folder": str(index), "spec": specs[label].model_dump()})
        (out / "cases.json").write_text(json.dumps(entries))
        launch(world, out, work / "data")
        folders |= {label: out / str(index) for index, label in enumerate(labels)}
    return folders


def launch(world: int, out: Path, data_root: Path) -> None:
    data_root.mkdir(exist_ok=True)
    write_data(data_root)
    done = run_ranks(world, "tests.parity.rank", str(out), str(data_root), limit_s=3600)
    if done.returncode:
        raise RuntimeError(f"{world} ranks ended with {done.returncode}:\n{done.stderr[-6000:]}")


def read_ranks(spec: JobSpec, folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(spec.layout.world_size)]


def load(spec: JobSpec, folder: Path) -> Run:
    output = read_ranks(spec, folder)
    assert not output[0]["failure"], output[0]["failure"]
    parts = [torch.load(folder / f"gradients-{rank}.pt", weights_only=True) for rank in range(spec.layout.world_size)]
    steps = [item for item in output[0]["items"] if item["kind"] == "step"]
    return Run(
        losses=[item["loss"] for item in steps],
        norms=[item["grad_norm"] for item in steps],
        gradients=whole_gradients(spec, parts),
        items=[s["items"] for s in output],
        cells=[s["cells"] for s in output],
        routed_rows=sum(s["routed_rows"] for s in output),
    )


def whole_gradients(spec: JobSpec, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Merge the shards of all ranks: ZeRO, then EP and TP. Replicas must match."""
    layout, whole = spec.layout, {}
    for stage in range(layout.pp):
        for unit in get_stage_units(spec.model, get_stage_chunks(spec.model, layout, stage)):
            for parameter in unit.parameters:
                name = get_full_name(unit, parameter)
                by_tp = []
                for tp in range(layout.tp):
                    ranks = [
                        get_rank(Coordinates(pp=stage, dp=dp, cp=cp, tp=tp), layout)
                        for dp in range(layout.dp)
                        for cp in range(layout.cp)
                    ]
                    by_tp.append(over_replicas(spec, parameter, [parts[r][name] for r in ranks]))
                gradient = over_tp(spec, parameter, by_tp)
                if name == "head.weight" and spec.model.tied_embeddings:
                    assert torch.equal(gradient, whole["embedding.weight"]), "tied copies differ"
                    continue
                whole[name] = gradient
    return whole


def over_replicas(spec: JobSpec, parameter: Parameter, parts: list[torch.Tensor]) -> torch.Tensor:
    """Merge shards of all dp x cp ranks. EP shards alternate. ZeRO shards are contiguous in each HSDP replica."""
    layout = spec.layout
    zero = get_placement(spec.model, layout, parameter).zero
    ep = layout.ep if parameter.is_expert else 1
    experts = []
    for e in range(ep):
        mine = parts[e::ep]
        shards = len(mine) // layout.dp_replicas if layout.zero else 1
        copies = [joined(mine[i : i + shards], zero.dim if zero else 0) for i in range(0, len(mine), shards)]
        experts.append(joined(copies, None))
    return torch.cat(experts)


def over_tp(spec: JobSpec, parameter: Parameter, parts: list[torch.Tensor]) -> torch.Tensor:
    shared = max(1, len(parts) // spec.model.num_kv_heads) if is_key_or_value(parameter) else 1
    distinct = [joined(parts[i : i + shared], None) for i in range(0, len(parts), shared)]
    whole = joined(distinct, parameter.tp_dim)
    if not is_vocabulary(parameter):
        return whole
    assert not whole[spec.model.vocab_size :].any(), "padding has a gradient"
    return whole[: spec.model.vocab_size]


def joined(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    if dim is not None:
        return torch.cat(parts, dim)
    for part in parts[1:]:
        assert relative(part, parts[0]) < TOLERANCE, "replicas hold different gradients"
    return parts[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ||a - b|| / ||b||."""
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-30))


def compare(case: Case, run: Run, reference: Run) -> Result:
    """Compare a run with its reference.

    Gradient norms are compared separately, because Adam hardly reacts to a wrong scale, so losses would not show it.
    """
    rows = [row for items in run.items for item in items if item["kind"] == "verdict" for row in item["rows"]]
    assert len([i for items in run.items for i in items if i["kind"] == "verdict"]) == case.spec.layout.world_size
    return Result(
        case=case,
        loss_difference=largest_difference(run.losses, reference.losses),
        norm_difference=largest_difference(run.norms, reference.norms),
        gradient_difference=gradient_difference(run.gradients, reference.gradients),
        wrong_bytes=sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        wrong_calls=sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
        wrong_memory=wrong_memory(case.spec, run.items),
        over_minimum=over_minimum(case.spec, run),
        proven=is_proven(run),
    )


def is_proven(run: Run) -> bool:
    """Return True if the run reports matching replicas and a match with the single-process reference."""
    return has_passed([item for item in run.items[0] if item["kind"] == "proof"][-1])


def has_passed(proof: dict[str, Any]) -> bool:
    """Return whether the first steps and the extra final step were compared and match."""
    return not proof["wrong"] and proof["one_process"]["state"] == proof["end"]["state"] == "equal"


def largest_difference(values: list[float], references: list[float]) -> float:
    """Return max |a - b| / |b|."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


def gradient_difference(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of any tensor.

    The gradient of a key bias is only rounding, because softmax does not change if all keys move together. It is
    compared with the norm of all gradients.
    """
    assert gradients.keys() == reference.keys()
    whole = torch.cat([g.flatten() for g in reference.values()]).double().norm()
    differences = []
    for name, expected in reference.items():
        scale = whole if name.endswith("attention.k.bias") else expected.double().norm()
        differences.append(float((gradients[name] - expected).double().norm() / scale))
    return max(differences)


def over_minimum(spec: JobSpec, run: Run) -> dict[str, float]:
    """Return algorithmic bytes of all steps over the theoretical minimum, by axis with traffic."""
    measured: dict[str, int] = defaultdict(int)
    for cell in (c for of_rank in run.cells for c in of_rank if c["phase"] == "step"):
        measured[cell["axis"]] += cell["algorithmic_bytes"]
    least = minimum(spec, run.routed_rows / spec.train.steps)
    assert {a for a in measured if measured[a] and a != "world"} == set(least)
    return {axis: measured[axis] / (least[axis] * spec.train.steps) for axis in least}


def minimum(spec: JobSpec, routed_rows: float) -> dict[str, float]:
    """Return the bytes that all ranks must send per step, in closed form, without `planner.cost.traffic`.

    `routed_rows` has the rows that the routers of a step sent to other ranks.
    """
    least = {
        "dp": least_data(spec),
        "tp": least_tensor(spec),
        "pp": least_pipeline(spec),
        "cp": least_context(spec),
        "ep": least_expert(spec, routed_rows),
    }
    return {axis: size for axis, size in least.items() if size}


def moe_layers(spec: JobSpec) -> int:
    return spec.model.num_layers - spec.model.moe.dense_layers if spec.model.moe else 0


def copied_over_tp(spec: JobSpec) -> tuple[int, int]:
    """Return elements that TP replicates, and those of routers: norms, row-parallel biases, positions."""
    model = spec.model
    gpt = model.arch == "gpt"
    norms = (2 * model.num_layers + 1) * model.hidden_size * (2 if gpt else 1)
    gpt_only = (2 * model.num_layers * model.hidden_size + model.max_seq_len * model.hidden_size) * gpt
    routers = moe_layers(spec) * model.hidden_size * model.moe.num_experts if model.moe else 0
    return norms + gpt_only + routers, routers


def shared_heads(spec: JobSpec) -> int:
    """Return elements of key and value weights for which TP ranks share heads."""
    model = spec.model
    if spec.layout.tp <= model.num_kv_heads:
        return 0
    return 2 * model.num_layers * model.hidden_size * model.num_kv_heads * model.head_size


def least_data(spec: JobSpec) -> float:
    """Return DP bytes by ZeRO 1910.02054 section 7: P parameters of a replica, n ranks: 2 P (n-1)/n.

    Stage 2 has a factor of 1+m, and stage 3 of 3m. If stage 3 does not reshard, the factor is 1+m. Breadth-first
    schedules (2211.05953 section 4.2) add one for the chunks of a rank except the last, which turns around. HSDP adds
    an all-reduce of each shard over replicas. Experts sharded by EP have n/ep replicas.
    """
    layout, model, m = spec.layout, spec.model, spec.train.micro_batches
    n, t = layout.dp * layout.cp, layout.tp
    experts = 0
    if model.moe and layout.ep > 1:
        experts = 3 * moe_layers(spec) * model.moe.num_experts * model.moe.expert_ffn_hidden_size * model.hidden_size
    table = model.vocab_size * model.hidden_size * (layout.pp > 1 and model.tied_embeddings)
    heads = shared_heads(spec)
    copies_of_heads = heads * (t // model.num_kv_heads - 1) if heads else 0
    dense = count_parameters(model) - experts + table + copied_over_tp(spec)[0] * (t - 1) + copies_of_heads
    units = {0: 2.0, 1: 2.0, 2: 1.0 + m, 3: 1.0 + m if layout.keep_gathered else 3.0 * m}[layout.zero]
    again = 1 - 1 / layout.virtual_stages if layout.keep_gathered else 0.0
    shards = n // layout.dp_replicas
    total = layout.dp_replicas * (shards - 1) * (units * dense + (again and again_of(spec, dense)))
    if layout.dp_replicas > 1:
        total += shards * layout.dp_replicas * 2 * (1 - 1 / layout.dp_replicas) * dense / shards
    if experts:
        total += layout.ep * (units + again) * (n // layout.ep - 1) * experts / layout.ep
    return total * FP32_BYTES


def again_of(spec: JobSpec, dense: float) -> float:
    """Return `dense` elements over PP and TP in chunks that a rank visits again, including the embedding."""
    model, t = spec.model, spec.layout.tp
    gpt, table = model.arch == "gpt", model.vocab_size * model.hidden_size
    positions = model.max_seq_len * model.hidden_size * t * gpt
    norm = model.hidden_size * t * (2 if gpt else 1)
    layers = dense - 2 * table - positions - norm
    return layers * (1 - 1 / spec.layout.virtual_stages) + table + positions


def least_tensor(spec: JobSpec) -> float:
    """Return TP bytes: 8 b s h (t-1)/t per layer (2104.04473 section 3.2).

    Full recompute adds one sum, and SP then gathers twice.
    """
    layout, model, train = spec.layout, spec.model, spec.train
    t, sp = layout.tp, layout.sequence_parallel
    if t == 1:
        return 0.0
    share = (t - 1) / t
    tokens = spec.micro_batch_size * train.seq_len // layout.cp
    hidden = tokens * model.hidden_size
    sums = 8 * model.num_layers + 4
    if layout.recompute == "full":
        sums += (3 if sp else 2) * model.num_layers
    if layout.regather:
        sums += 1 + (0 if layout.recompute == "full" else 2 * model.num_layers)
    replicas = layout.dp * layout.cp
    total = replicas * t * train.micro_batches * share * (sums * hidden + 3 * 2 * tokens)
    if layout.scatter_gather:
        total += replicas * t * train.micro_batches * share * 2 * crossings(spec) * hidden
    copied, routers = copied_over_tp(spec)
    held_once = layout.dp_replicas if layout.zero else replicas
    total += held_once * t * 2 * share * (copied if sp else routers)
    heads = shared_heads(spec)
    if heads:
        total += held_once * t * 2 * (1 - model.num_kv_heads / t) * heads / model.num_kv_heads
    return total * FP32_BYTES


def crossings(spec: JobSpec) -> int:
    """Return boundaries between chunks on different ranks: all except the turn of a V schedule."""
    chunks = spec.layout.pp * spec.layout.virtual_stages
    return chunks - 1 - (spec.layout.schedule in ("zbv", "dualpipev"))


def least_pipeline(spec: JobSpec) -> float:
    """Return bytes of hidden states over each boundary and back, per TP group, and of a tied embedding."""
    layout, model = spec.layout, spec.model
    if layout.pp == 1:
        return 0.0
    hidden = spec.micro_batch_size * spec.train.seq_len * model.hidden_size
    parts = 1 if layout.sequence_parallel or layout.scatter_gather else layout.tp
    total = layout.dp * parts * 2.0 * crossings(spec) * spec.train.micro_batches * hidden
    if model.tied_embeddings and layout.schedule not in ("zbv", "dualpipev"):
        held_once = layout.dp_replicas if layout.zero else layout.dp * layout.cp
        total += held_once * 2 * model.vocab_size * model.hidden_size
    return total * FP32_BYTES


def least_context(spec: JobSpec) -> float:
    """Return bytes of keys and values to cp - 1 ranks, again in backward, their gradients, and balance-loss counts."""
    layout, model, train = spec.layout, spec.model, spec.train
    c = layout.cp
    if c == 1:
        return 0.0
    again = layout.recompute == "full"
    heads = max(model.num_kv_heads, layout.tp)  # over the tp ranks together
    kv = 2 * spec.micro_batch_size * train.seq_len * heads * model.head_size
    total = layout.dp * train.micro_batches * model.num_layers * (3 + again) * (c - 1) * kv
    if model.moe and model.moe.balance_loss:
        counts = spec.micro_batch_size * model.moe.num_experts * 2 * (c - 1)
        total += layout.dp * layout.tp * train.micro_batches * moe_layers(spec) * (1 + again) * counts
    return float(total * FP32_BYTES)


def least_expert(spec: JobSpec, routed_rows: float) -> float:
    """Return bytes of tokens to experts on other ranks and back, twice, and int64 counts without capacity.

    With a capacity, buffers are full, and each rank receives an equal share.
    """
    layout, model, train = spec.layout, spec.model, spec.train
    if layout.ep == 1 or model.moe is None:
        return 0.0
    moe, again = model.moe, layout.recompute == "full"
    share, layers = (layout.ep - 1) / layout.ep * layout.tp, moe_layers(spec)
    if moe.capacity_factor is not None:
        capacity = -(-moe.capacity_factor * moe.experts_per_token * train.seq_len // moe.num_experts)
        rows = share * layers * train.global_batch * moe.num_experts * capacity
        return rows * model.hidden_size * (4 + 2 * again) * FP32_BYTES
    calls = layout.dp * layout.cp * train.micro_batches * (1 + again)
    counts = share * layers * calls * moe.num_experts * 8
    return routed_rows / (1 + again) * model.hidden_size * (4 + 2 * again) * FP32_BYTES + counts


def table_row(result: Result) -> str:
    ratios = " ".join(f"{axis} {ratio:.2f}" for axis, ratio in sorted(result.over_minimum.items()))
    verdict = "pass" if result.passed else "FAIL"
    differences = (result.loss_difference, result.norm_difference, result.gradient_difference)
    return (
        f"{result.case.label:34} {result.case.spec.layout.world_size:5} {' '.join(f'{d:10.1e}' for d in differences)} "
        f"{result.wrong_bytes:8} B {result.wrong_calls:6}  {ratios:24} {verdict}"
    )


def format_verified(run: VerifiedRun) -> str:
    first, end = run.proof["one_process"], run.proof["end"]
    worst = " ".join(f"{proof[name]:8.1e}" for proof in (first, end) for name in ("gradient", "update", "loss", "norm"))
    wrong = "; ".join(f"{apart['what']} of {apart['name']}: {apart['apart']}" for apart in run.proof["wrong"][:3])
    why = wrong or "; ".join(proof["why"] for proof in (first, end) if proof["state"] != "equal")
    verdict = "pass" if run.passed else f"FAIL {why}"
    return f"{run.label:34} {worst} {run.wrong_bytes:8} B {run.wrong_calls:6}  {verdict}"


HEADER = (
    f"{'layout':34} {'ranks':>5} {'loss diff':>10} {'norm diff':>10} {'grad diff':>10} {'byte diff':>10} {'calls':>6}  "
    f"{'bytes/minimum':24} verdict"
)

COUNTED = ("parameters", "gradients", "optimizer")


def wrong_memory(spec: JobSpec, items: list[list[dict[str, Any]]]) -> int:
    """Return the byte difference of the fullest rank of a stage. Shorter shards have smaller moments."""
    counted = [item["memory"] for figures in items for item in figures if item["kind"] == "verdict"]
    wrong = 0
    for stage in range(spec.layout.pp):
        plan = {**get_memory(spec, stage), "gradients": get_gradient_bytes(spec, stage)}
        mine = [parts for rank, parts in enumerate(counted) if get_coordinates(rank, spec.layout).pp == stage]
        wrong += sum(abs(max(parts[name] for parts in mine) - plan[name]) for name in COUNTED)
    return wrong
