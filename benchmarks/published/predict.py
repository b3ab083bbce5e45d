"""The planner's answer to each published row. Nothing is fitted here."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.mapping import Planned, plan_of
from benchmarks.published.rows import PublishedRow, SkipError
from planner.cost.alike import alike_stages
from planner.cost.beside import allowance
from planner.cost.memory import memory, most_bytes
from planner.cost.pipes import chunks_in_flight
from planner.cost.timing import Timer
from planner.facts.flops import model_flops
from planner.facts.precision import FP32_BYTES
from planner.facts.shards import local_units
from planner.facts.spec import JobSpec, Recompute
from planner.hardware.stacks import EAGER_NORMS, EAGER_SCORES

WORKSPACE_BYTES = 32 * 2**20
EAGER_NORM_BYTES = 8
EAGER_SCORE_BYTES = 12


class Answer(NamedTuple):
    """Prediction and measurement in the row's unit: seconds, bytes, or for fit the share of memory taken and 0."""

    row: PublishedRow
    planned: Planned
    predicted: float
    measured: float
    fits: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Predictor:
    """Keeps one timer for each cluster and stack."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}

    def answer(self, row: PublishedRow) -> Answer:
        """What the planner says of the row.

        Raises:
            SkipError: with the reason.
        """
        planned = plan_of(row)
        spec = planned.spec
        if planned.any_recompute:
            spec = self._usual_recompute(planned)
            planned = planned._replace(spec=spec)
        needed = self._needed(planned, spec)
        fits = needed <= _room(planned) or (planned.any_recompute and self._fits_somehow(planned))
        if row.kind == "out_of_memory":
            return Answer(row, planned, needed / _room(planned), 0.0, fits)
        if row.kind == "time":
            return Answer(row, planned, self._seconds(planned, spec), _measured_seconds(row, spec), fits)
        if row.kind == "steady":
            return Answer(row, planned, _steady(planned, spec.layout.pp - 1), row.num_bytes, fits)
        peak = _tensors(spec, planned.stage) + _workspaces(planned)
        peak += _eager_bytes(planned, spec) + _kempner_bytes(planned, spec) + _weighed_bytes(planned)
        told = {"device": needed, "reserved": peak * (1 + planned.cluster.accelerator.fragmentation), "allocated": peak}
        return Answer(row, planned, told[planned.meter], row.num_bytes, fits)

    def _fits_somehow(self, planned: Planned) -> bool:
        """Where a recipe's recompute is not told, with as much of it as there is."""
        return self._needed(planned, _recomputing(planned.spec, "full")) <= _room(planned)

    def _usual_recompute(self, planned: Planned) -> JobSpec:
        """Where a recipe is not told: whole layers only where ZeRO-3 would not fit otherwise. Recipes with other axes
        repeat single modules at most."""
        light = _recomputing(planned.spec, "selective")
        if planned.spec.layout.zero < 3 or self._needed(planned, light) <= _room(planned):
            return light
        return _recomputing(planned.spec, "full")

    def _seconds(self, planned: Planned, spec: JobSpec) -> float:
        key = planned.cluster.model_dump_json(), repr(planned.kernels)
        if key not in self._timers:
            self._timers[key] = Timer(planned.cluster, {planned.stack: planned.kernels})
        timer = self._timers[key]
        return timer.step(spec).step_s * planned.scale

    def _needed(self, planned: Planned, spec: JobSpec) -> float:
        tensors = _tensors(spec, None) + _eager_bytes(planned, spec) + _kempner_bytes(planned, spec)
        return tensors + allowance(spec, planned.cluster, tensors)


def _eager_bytes(planned: Planned, spec: JobSpec) -> int:
    """What eager kernels keep beside the planner's own: of a norm its input and its output in fp32, of scores their
    fp32 copies in one layer's backward."""
    layout, train = spec.layout, spec.train
    tokens = spec.micro_batch_size * train.seq_len // layout.cp
    extra = 0
    if planned.kernels.norms == EAGER_NORMS:
        rows = tokens // (layout.tp if layout.sequence_parallel else 1)
        layers = 1 if layout.recompute == "full" else spec.model.num_layers // layout.pp
        chunks = chunks_in_flight(layout, 0, train.micro_batches)
        flight = 1 if layout.recompute == "full" else chunks / layout.virtual_stages
        extra += round(2 * rows * spec.model.hidden_size * layers * flight * EAGER_NORM_BYTES)
    if planned.kernels.scores == EAGER_SCORES:
        extra += tokens * train.seq_len * spec.model.num_heads // layout.tp * EAGER_SCORE_BYTES
    return extra


def _kempner_bytes(planned: Planned, spec: JobSpec) -> int:
    """Whole gradients added up in fp32 until the last micro-batch is reduced; and the loss without a pipe: logits of
    the whole vocabulary, their log-softmax and both gradients in 16 bits, where the tape has a rank's share of them,
    with the last three in fp32."""
    if not planned.kempner:
        return 0
    layout, train, extra = spec.layout, spec.train, 0
    if layout.zero == 3 and train.micro_batches > 1:
        extra += sum(p.numel for unit in local_units(spec, 0) for p in unit.parameters) * FP32_BYTES
    if layout.pp == 1:
        logits = spec.micro_batch_size * train.seq_len * spec.model.vocab_size
        extra += logits * 4 * 2 - logits // layout.tp * (2 + 3 * FP32_BYTES)
    return extra


def _recomputing(spec: JobSpec, policy: Recompute) -> JobSpec:
    return spec.model_copy(update={"layout": spec.layout.model_copy(update={"recompute": policy})})


def _room(planned: Planned) -> int:
    return planned.cluster.accelerator.memory_bytes


def _tensors(spec: JobSpec, stage: int | None) -> int:
    if stage is not None:
        return sum(memory(spec, stage).values())
    return max(most_bytes(spec, stages) for stages in alike_stages(spec))


def _steady(planned: Planned, stage: int) -> float:
    """What stays between steps: weights, gradients and moments as the stack keeps them (1910.02054 figure 1)."""
    parts = memory(planned.spec, stage)
    return sum(parts[name] for name in ("parameters", "gradients", "optimizer")) + _workspaces(planned)


def _workspaces(planned: Planned) -> int:
    """What stays allocated for products in every value of Megatron-LM's own tests: 32 MiB each of cuBLAS
    (CUBLAS_WORKSPACE_CONFIG=:4096:8), Transformer Engine (`get_cublas_workspace_size_bytes`) and NCCL's streams; of
    each of the 4 streams on which it computes experts together."""
    if not planned.own_tests:
        return 0
    grouped = planned.spec.model.moe is not None and not planned.kernels.experts_apart
    return (3 + (4 if grouped else 0)) * WORKSPACE_BYTES


def _weighed_bytes(planned: Planned) -> int:
    """What experts' activations take again, times their probabilities, where no kernel does both: in Megatron-LM's own
    tests without swiglu (--no-bias-gelu-fusion; mlp.py, `per_token_scale`). Gated experts stand for theirs: of three
    halves the width."""
    layout, train, model = planned.spec.layout, planned.spec.train, planned.spec.model
    if not planned.own_tests or model.moe is None or planned.gated:
        return 0
    tokens = planned.spec.micro_batch_size * train.seq_len // layout.cp
    wide = tokens * model.moe.experts_per_token * model.moe.expert_ffn_hidden_size * 3 // 2 // layout.tp
    stage = planned.stage or 0
    chunks = chunks_in_flight(layout, stage, train.micro_batches)
    layers = (model.num_layers - model.moe.dense_layers) // layout.pp
    return 2 * wide * layers * chunks // layout.virtual_stages


def _measured_seconds(row: PublishedRow, spec: JobSpec) -> float:
    seconds = row.seconds
    if seconds is None and row.fields["measure_name"] == "model_tflops_per_gpu":
        seconds = model_flops(spec) / (row.value * 1e12 * row.count("gpus"))
    if not seconds or seconds <= 0:
        raise SkipError("no step time")
    return seconds
