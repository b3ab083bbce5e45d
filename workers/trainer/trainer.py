"""Train a job on one rank: steps, validations, checkpoints, and the final report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from contracts.telemetry.batches import Item
from contracts.telemetry.items import EvalItem, Phase, PhaseItem, StepBreakdown, StepItem, Work
from contracts.telemetry.results import VerdictItem
from planner.facts.schedules import Action
from planner.facts.spec import JobSpec, TrainSpec
from workers.device import barrier
from workers.meter.exporter import StartReporter
from workers.meter.recorder import Recorder
from workers.trainer.dataset import TokenDataset, Tokens
from workers.trainer.errors import DivergedError, VerificationError
from workers.trainer.memory import MemoryProbe, PeakMemory, TensorSource
from workers.trainer.model import Decoder
from workers.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    compute_gradient_square_sum,
    get_learning_rate,
    reduce_shared_gradients,
    update_weights,
)
from workers.trainer.parallel.context_parallel import get_document_ids
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.parallelize import ModelShard, parallelize
from workers.trainer.parallel.pipeline_parallel import PipelineRunner, StageChannel
from workers.trainer.traffic_check import compare_run_traffic

Send = Callable[[Item], None]
Log = Callable[[str], None]
SaveCheckpoint = Callable[[int], None]  # called with the number of steps done
ShouldStop = Callable[[int], bool]  # called with the number of steps done, the answer is the same on all ranks


@dataclass(frozen=True)
class StepResult:
    """Global mean loss and gradient norm of a step, before clipping."""

    loss: float
    grad_norm: float

    @property
    def not_finite(self) -> str:
        """Names and values of the results that are NaN or infinite, as text."""
        named = (("loss", self.loss), ("gradient norm", self.grad_norm))
        return " and ".join(f"{name} is {value}" for name, value in named if not math.isfinite(value))


def raise_if_diverged(not_finite: str, index: int, train: TrainSpec) -> None:
    """Raise a `DivergedError` if a result is not finite and the spec does not allow it.

    All ranks have the same results, so all ranks raise or none does.
    """
    if not not_finite or train.on_not_finite == "continue":
        return
    rate = f"learning rate {train.learning_rate:g} ({get_learning_rate(index, train):.3g} at this step)"
    clip = f"gradient clip {train.grad_clip:g}" if train.grad_clip else "gradient clip off"
    raise DivergedError(f"{not_finite} at step {index + 1}; {rate}, {clip}, precision {train.precision}")


class StepVerifier(Protocol):
    """Verify training steps (counted from 0). `failure` is empty, or the same text on all ranks."""

    failure: str

    @property
    def retained_bytes(self) -> int:
        """Bytes of the tensors that the verifier keeps between steps."""

    def verifies_step(self, index: int) -> bool:
        """Return whether the verifier inspects a step."""

    def check_gradients(self, index: int) -> None:
        """Inspect a step when gradients are complete and clipped."""

    def check_update(self, index: int, result: StepResult) -> None:
        """Inspect a step after the update."""

    def check_before_stop(self, steps_done: int) -> None:
        """Compare replicas before a requested save and stop."""

    def check_end(self) -> None:
        """Verify the end of the run. The weights may change, because no step follows."""


@dataclass
class RunHooks:
    """Connections of a training run. None turns a feature off."""

    send: Send
    log: Log
    verifier: StepVerifier | None = None
    peak: PeakMemory | None = None
    startup: StartReporter | None = None
    save: SaveCheckpoint | None = None
    should_stop: ShouldStop | None = None
    steps_done: int = 0


class Trainer:
    """Model, optimizer, data, and pipeline of one rank.

    The spec is resolved once, before construction: `mesh` has the coordinates and the process groups of the rank,
    `model` has the chunks of its stage.
    """

    def __init__(
        self,
        spec: JobSpec,
        mesh: Mesh,
        model: ModelShard,
        dataset: TokenDataset,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.spec, self.mesh, self.model, self.dataset, self.recorder = spec, mesh, model, dataset, recorder
        self.device = device
        self.optimizer = build_optimizer(model, spec.train)
        self.pipeline = PipelineRunner(
            spec.layout, mesh.coordinates.pp, spec.train.micro_batches, self._build_channel()
        )
        self.tokens = spec.train.global_batch * spec.train.seq_len
        replica_rows = spec.train.global_batch // spec.layout.dp
        self._rows = slice(mesh.coordinates.dp * replica_rows, (mesh.coordinates.dp + 1) * replica_rows)
        self.batch: Tokens | None = None  # of the last step
        self.current_micro_batch = 0
        self.last_eval_loss: float | None = None
        self.get_staged_tensors: TensorSource = tuple  # copies for a checkpoint that is being written
        self.memory_probe: MemoryProbe | None = None

    @classmethod
    def build(
        cls, spec: JobSpec, mesh: Mesh, dataset: TokenDataset, recorder: Recorder, device: torch.device
    ) -> Trainer:
        """Build and parallelize the model, and return its trainer."""
        return cls(spec, mesh, parallelize(spec, mesh, device), dataset, recorder, device)

    def train(self, hooks: RunHooks) -> None:
        """Train the steps after `hooks.steps_done`, and report the results of the run.

        Step times, step traffic, and peak memory exclude verification.
        """
        self._begin_run(hooks)
        for index in range(hooks.steps_done, self.spec.train.steps):
            self._run_step(index)
            self._validate(index)
            if self._save(index + 1):
                return
        self._end_run()

    def train_step(self, index: int, inspect: Callable[[], None] | None = None) -> StepResult:
        """Run forward, backward, and update of a step. `inspect` is called after gradients are clipped."""
        self.forward_backward(index)
        if self.memory_probe is not None:
            self.memory_probe.record_gradients()
        squares, loss = self.reduce_statistics().tolist()
        result = StepResult(loss=loss, grad_norm=squares**0.5)
        self.clip_gradients(result.grad_norm)
        if inspect is not None:
            inspect()
        self.update_weights(index)
        return result

    def forward_backward(self, index: int) -> None:
        """Run all micro-batches of a step. Gradients are complete and not clipped afterwards."""
        train, parallel = self.spec.train, self.model.data_parallel
        with self.recorder.time_span("data"):
            batch = self.dataset.train_batch(train.seed, index, train.global_batch, self._rows, train.seq_len)
            chunks = BatchChunkRunner(self, batch)
        self.batch = batch
        parallel.before_step()
        self._loss = self.pipeline.run_step(chunks)
        with self._measure_memory():
            parallel.after_backward()
            reduce_shared_gradients(self.spec, self.model, self.mesh)

    def reduce_statistics(self) -> torch.Tensor:
        """Return squared gradient norm and mean loss of the last backward, (2,) float64, summed over all ranks."""
        statistics = torch.stack([compute_gradient_square_sum(self.model), self._scale_loss(self._loss)])
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(statistics)
        return statistics

    def clip_gradients(self, grad_norm: float) -> None:
        """Scale the gradients if their global norm exceeds the limit of the spec."""
        with self.record_work("optimizer"):
            clip_gradients(self.model, grad_norm, self.spec.train.grad_clip)

    def update_weights(self, index: int) -> None:
        """Set the learning rate, and run the optimizer."""
        with self.record_work("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = get_learning_rate(index, self.spec.train)
            update_weights(self.model, self.optimizer)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over one global batch of held-out sequences, the same sequences every time."""
        train = self.spec.train
        batch = self.dataset.eval_batch(train.seed, train.global_batch, self._rows, train.seq_len)
        loss = self.pipeline.run_forward(BatchChunkRunner(self, batch))
        self.model.data_parallel.after_eval()
        total = self._scale_loss(loss).reshape(1)
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(total)
        self.last_eval_loss = float(total)
        return self.last_eval_loss

    def pop_received_rows(self) -> int:
        """Return the rows that this rank's experts received since the last call."""
        return sum(decoder.strategy.ep.received.clear() for decoder in self.model.chunks.values())

    @contextmanager
    def record_work(self, work: Work, chunk: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Record the time and the memory of one action of a step."""
        with self._measure_memory(), self.recorder.time_span(work, chunk, micro_batch):
            yield

    def _measure_memory(self) -> AbstractContextManager[None]:
        return nullcontext() if self.memory_probe is None else self.memory_probe.measure_action()

    def _build_channel(self) -> StageChannel | None:
        layout, train = self.spec.layout, self.spec.train
        if layout.pp == 1:
            return None
        seq_len = train.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
        shape = (self.spec.micro_batch_size, seq_len, self.spec.model.hidden_size)
        tp = next(iter(self.model.chunks.values())).strategy.tp
        return StageChannel(self.mesh, shape, self.model.dtype, self.device, tp)

    def _scale_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's term of the global mean loss. All tp ranks of the last stage have the same loss."""
        scaled = torch.zeros((), device=self.device) if loss is None else loss / self.mesh.layout.tp
        return scaled.double()

    # Methods of a whole run, in the order of `train`.

    def _begin_run(self, hooks: RunHooks) -> None:
        self.hooks = hooks
        self._peak = hooks.peak if hooks.steps_done < self.spec.train.steps else None
        self._last_step_probe: MemoryProbe | None = None
        self._received: dict[Phase, int] = {"step": 0, "eval": 0}
        if self.spec.layout.world_size > 1:
            barrier(self.device)
        self._enter_phase("step")

    def _run_step(self, index: int) -> None:
        hooks, recorder, steps = self.hooks, self.recorder, self.spec.train.steps
        recorder.set_phase("step")
        recorder.step = index + 1
        if self._peak is not None and index + 1 == steps:
            self._last_step_probe = MemoryProbe(self.model, self.optimizer, self._peak, self.get_staged_tensors)
            self.memory_probe = self._last_step_probe
        verifies = hooks.verifier is not None and hooks.verifier.verifies_step(index)
        self._inspection_s = 0.0
        recorder.begin_step(index + 1)
        started = time.perf_counter()
        result = self.train_step(index, partial(self._inspect_gradients, index) if verifies else None)
        elapsed = time.perf_counter() - started - self._inspection_s
        parts = recorder.end_step(index + 1)
        self.memory_probe = None
        self._received["step"] += self.pop_received_rows()
        hooks.send(self._make_step_item(index, result, elapsed, parts))
        if hooks.startup is not None:
            hooks.startup.report("first step")
        if self.mesh.rank == 0:
            speed = self.tokens / elapsed
            hooks.log(
                f"step {index + 1}/{steps} loss {result.loss:.4f} norm {result.grad_norm:.3f} {speed:,.0f} tokens/s"
            )
        raise_if_diverged(result.not_finite, index, self.spec.train)
        if verifies:
            self._verify_update(index, result)

    def _inspect_gradients(self, index: int) -> None:
        """Let the verifier inspect the gradients of a running step."""
        started = time.perf_counter()
        self.recorder.set_phase("proof")
        with self._pause_peak() as verifier:
            verifier.check_gradients(index)
        self.recorder.set_phase("step")
        self._inspection_s = time.perf_counter() - started

    def _verify_update(self, index: int, result: StepResult) -> None:
        self._enter_phase("proof")
        with self._pause_peak() as verifier:
            verifier.check_update(index, result)
        self._enter_phase("step")
        if index + 1 < self.spec.train.steps:
            self._raise_if_failed(verifier)

    @contextmanager
    def _pause_peak(self) -> Iterator[StepVerifier]:
        """Exclude the memory of the verifier from the peak memory."""
        verifier = self.hooks.verifier
        assert verifier is not None
        if self._peak is not None:
            self._peak.pause()
        yield verifier
        if self._peak is not None:
            self._peak.resume(verifier.retained_bytes)

    def _validate(self, index: int) -> None:
        """Evaluate the model if a validation is due after a step."""
        train, hooks = self.spec.train, self.hooks
        if not _is_due(index + 1, train.eval_every, train.steps):
            return
        self._enter_phase("eval")
        with self.recorder.time_span("eval"):
            loss = self.evaluate()
        self._received["eval"] += self.pop_received_rows()
        if self.mesh.rank == 0:
            hooks.log(f"step {index + 1}/{train.steps} validation loss {loss:.4f}")
        if not math.isfinite(loss):
            raise_if_diverged(f"validation loss is {loss}", index, train)
        elif self.mesh.rank == 0:
            hooks.send(EvalItem(kind="eval", rank=self.mesh.rank, time=time.time(), step=index + 1, loss=loss))
        self._enter_phase("step")

    def _save(self, step: int) -> bool:
        """Save a checkpoint if one is due after `step` steps, and return whether the run stops here."""
        train, hooks = self.spec.train, self.hooks
        if hooks.save is None:
            return False
        # A checkpoint has one replica of each shard, so a difference between replicas would be lost.
        replicas_match = hooks.verifier is None or not hooks.verifier.failure
        due = replicas_match and _is_due(step, train.checkpoint_every, train.steps)
        stops = hooks.should_stop is not None and step < train.steps and hooks.should_stop(step)
        if stops and hooks.verifier is not None:
            self._enter_phase("proof")
            hooks.verifier.check_before_stop(step)
            self._enter_phase("step")
            self._raise_if_failed(hooks.verifier)
        if due or stops:
            with self.recorder.time_span("checkpoint"):
                hooks.save(step)
        if stops:
            hooks.log(f"stopping after step {step}/{train.steps}: the run was asked to save and stop")
        return stops

    def _end_run(self) -> None:
        """Verify the end of the run, and send the traffic check and the peak memory."""
        hooks, rank = self.hooks, self.mesh.rank
        if self._peak is not None:
            self._peak.read()
        memory = None if self._last_step_probe is None else self._last_step_probe.get_breakdown()
        if hooks.verifier is not None:
            self._enter_phase("proof")
            hooks.verifier.check_end()
        self._enter_phase("teardown")
        rows = compare_run_traffic(self.spec, rank, self.recorder.get_cells(), self._received, hooks.steps_done)
        item = VerdictItem(kind="verdict", rank=rank, time=time.time(), rows=rows)
        if self._peak is not None:
            item["peak_bytes"] = max(0, self._peak.max_bytes)
        if memory is not None:
            item["memory"] = memory
        hooks.send(item)
        wrong_bytes = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows)
        wrong_calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows)
        total = sum(row["measured_bytes"] for row in rows)
        hooks.log(f"traffic check: measured {total:,} B, absolute difference {wrong_bytes:,} B, {wrong_calls} calls")
        if hooks.verifier is not None:
            self._raise_if_failed(hooks.verifier)

    def _enter_phase(self, phase: Phase) -> None:
        self.recorder.set_phase(phase)
        self.hooks.send(PhaseItem(kind="phase", rank=self.mesh.rank, time=time.time(), phase=phase))

    def _raise_if_failed(self, verifier: StepVerifier) -> None:
        if verifier.failure:
            raise VerificationError(verifier.failure)

    def _make_step_item(self, index: int, result: StepResult, elapsed: float, parts: StepBreakdown) -> StepItem:
        item = StepItem(
            kind="step",
            rank=self.mesh.rank,
            time=time.time(),
            step=index + 1,
            ran=index + 1 - self.hooks.steps_done,
            steps=self.spec.train.steps,
            step_s=elapsed,
            tokens=self.tokens,
            loss=_finite_or_none(result.loss),
            grad_norm=_finite_or_none(result.grad_norm),
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            cells=self.recorder.get_cells("step"),
            parts=parts,
        )
        if result.not_finite:
            item["not_finite"] = result.not_finite
        return item


class BatchChunkRunner:
    """Run this rank's chunks on one batch, as the pipeline schedules them."""

    def __init__(self, trainer: Trainer, batch: Tokens) -> None:
        self._trainer, self._model = trainer, trainer.model
        self._batch = torch.from_numpy(batch).to(trainer.device)
        self._local_index = {chunk: i for i, chunk in enumerate(trainer.model.chunks)}

    def forward(self, chunk: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        with self._trainer.record_work("forward", chunk, micro_batch):
            decoder = self._model.chunks[chunk]
            self._select_micro_batch(decoder, micro_batch)
            size = self._trainer.spec.micro_batch_size
            rows = self._batch[micro_batch * size : (micro_batch + 1) * size]
            cp = decoder.strategy.cp
            documents = get_document_ids(rows[:, :-1], self._trainer.spec.train.document_end)
            output: torch.Tensor = decoder(cp.own_part(rows[:, :-1], 1) if hidden is None else hidden, documents)
            if decoder.final_norm is None:
                return output
            return decoder.loss_sum(output, cp.own_part(rows[:, 1:], 1)) / self._trainer.tokens

    def backward(
        self, action: Action, output: torch.Tensor, gradient: torch.Tensor | None, *, last: bool, split: bool
    ) -> None:
        chunk = action.chunk
        with self._trainer.record_work("backward", chunk, action.micro_batch):
            self._select_micro_batch(self._model.chunks[chunk], action.micro_batch)
            self._model.data_parallel.before_backward(self._local_index[chunk], last=last, split=split)
            torch.autograd.backward(output, gradient)

    def compute_weight_gradients(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        weight_gradients = self._model.chunks[chunk].strategy.weight_gradients
        assert weight_gradients is not None
        with self._trainer.record_work("weights", chunk, micro_batch):
            parameters = weight_gradients.add(micro_batch)
            self._model.data_parallel.after_weight_gradients(self._local_index[chunk], parameters, last=last)

    def release(self, chunk: int) -> None:
        self._model.data_parallel.after_chunk(self._local_index[chunk])

    def _select_micro_batch(self, decoder: Decoder, micro_batch: int) -> None:
        self._trainer.current_micro_batch = micro_batch
        if decoder.strategy.weight_gradients is not None:
            decoder.strategy.weight_gradients.micro_batch = micro_batch


def _is_due(step: int, every: int, steps: int) -> bool:
    """Return whether a periodic action is due after a step. It is also due after the last step."""
    return bool(every) and (step % every == 0 or step == steps)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
