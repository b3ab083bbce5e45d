"""The training loop of one rank: steps, validations, and what is said about them.

What a step came to, and whether a run goes on after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from contracts.telemetry.batches import Item
from contracts.telemetry.results import VerdictItem
from contracts.telemetry.steps import EvalItem, PhaseItem, StepBreakdown, StepItem
from contracts.telemetry.vocabulary import Phase, Work
from planner.facts.schedules import Action
from planner.facts.spec import JobSpec, TrainSpec
from workers.device import barrier
from workers.meter.exporter import StartReporter
from workers.meter.recorder import Recorder
from workers.trainer.dataset import Corpus, Tokens
from workers.trainer.errors import DivergedError, ProofError
from workers.trainer.memory import Copies, Peak, Standing
from workers.trainer.model import Decoder
from workers.trainer.optimizer import (
    clip_gradients,
    finish_gradients,
    gradient_square_sum,
    learning_rate,
    make_optimizer,
    update,
)
from workers.trainer.parallel.document_mask import documents_of
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.parallelize import Part
from workers.trainer.parallel.pipeline_parallel import Boundary, Pipeline
from workers.trainer.traffic_check import verdict

Send = Callable[[Item], None]


class Trainer:
    """One rank's model, optimiser and data, and the step they make."""

    def __init__(
        self, spec: JobSpec, mesh: Mesh, part: Part, corpus: Corpus, recorder: Recorder, device: torch.device
    ) -> None:
        self.spec, self.mesh, self.part, self.corpus, self.recorder = spec, mesh, part, corpus, recorder
        self.device = device
        self.copies: Copies = tuple  # of checkpoints
        self.standing: Standing | None = None
        self.rows: Tokens | None = None  # of the last step
        self.validation: float | None = None  # the last
        self.micro_batch = 0  # that is computed
        self.optimizer = make_optimizer(part, spec.train)
        self.tokens = spec.train.global_batch * spec.train.seq_len
        self.pipeline = Pipeline(spec.layout, mesh.place.pp, spec.train.micro_batches, self._boundary())

    def step(self, index: int, look: Callable[[], None] | None = None) -> StepResult:
        """Forward, backward and update of optimiser step `index` (from 0); `look` before gradients are clipped."""
        self.backward(index)
        if self.standing is not None:
            self.standing.complete()
        squares, loss = self.reduce_statistics().tolist()
        result = StepResult(loss=loss, grad_norm=squares**0.5)
        if look is not None:
            look()
        self.update(index, result.grad_norm)
        return result

    def update(self, index: int, norm: float) -> None:
        """Clip the gradients, of which this is the norm, and update weights with them."""
        with self.doing("optimizer"):
            clip_gradients(self.part, norm, self.spec.train.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(index, self.spec.train)
            update(self.part, self.optimizer)

    def backward(self, index: int) -> None:
        """All micro-batches of a step; gradients are complete and unclipped afterwards."""
        train, parallel = self.spec.train, self.part.data_parallel
        with self.recorder.time_span("data"):
            batch = self.corpus.train_batch(train.seed, index, train.global_batch, self._rows(), train.seq_len)
            chunks = StageChunks(self, batch)
        self.rows = batch
        parallel.before_step()
        self._loss = self.pipeline.step(chunks)
        with self._within():
            parallel.after_backward()
            finish_gradients(self.spec, self.part, self.mesh)

    @contextmanager
    def doing(self, work: Work, chunk: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """An action of a step."""
        with self._within(), self.recorder.time_span(work, chunk, micro_batch):
            yield

    def _within(self) -> AbstractContextManager[None]:
        return nullcontext() if self.standing is None else self.standing.within()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over one global batch of held-out sequences, the same ones every time."""
        train = self.spec.train
        batch = self.corpus.eval_batch(train.seed, train.global_batch, self._rows(), train.seq_len)
        loss = self.pipeline.forward(StageChunks(self, batch))
        self.part.data_parallel.after_eval()
        total = self._own_loss(loss).reshape(1)
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(total)
        self.validation = float(total)
        return self.validation

    def received_rows(self) -> int:
        """Rows that came to this rank's experts since the last call."""
        return sum(decoder.strategy.ep.received.clear() for decoder in self.part.chunks.values())

    def _boundary(self) -> Boundary | None:
        layout, train = self.spec.layout, self.spec.train
        if layout.pp == 1:
            return None
        seq_len = train.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
        shape = (self.spec.micro_batch_size, seq_len, self.spec.model.hidden_size)
        tp = next(iter(self.part.chunks.values())).strategy.tp
        return Boundary(self.mesh, shape, self.part.dtype, self.device, tp)

    def _rows(self) -> slice:
        """This replica's rows of the global batch."""
        share = self.spec.train.global_batch // self.spec.layout.dp
        return slice(self.mesh.place.dp * share, (self.mesh.place.dp + 1) * share)

    def _own_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """What this rank adds to the global mean: tp ranks of the last stage know the same loss."""
        share = torch.zeros((), device=self.device) if loss is None else loss / self.mesh.layout.tp
        return share.double()

    def reduce_statistics(self) -> torch.Tensor:
        """Squared gradient norm and mean loss of the last backward, over the whole world, (2,) float64."""
        statistics = torch.stack([gradient_square_sum(self.part), self._own_loss(self._loss)])
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(statistics)
        return statistics


class StageChunks:
    """This rank's chunks on one batch, as the pipeline's engine drives them."""

    def __init__(self, trainer: Trainer, batch: Tokens) -> None:
        self._trainer, self._part = trainer, trainer.part
        self._batch = torch.from_numpy(batch).to(trainer.device)
        self._local = {chunk: i for i, chunk in enumerate(trainer.part.chunks)}

    def forward(self, chunk: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        with self._trainer.doing("forward", chunk, micro_batch):
            return self._forward(chunk, micro_batch, hidden)

    def _forward(self, chunk: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        decoder = self._part.chunks[chunk]
        self._turn(decoder, micro_batch)
        size = self._trainer.spec.micro_batch_size
        rows = self._batch[micro_batch * size : (micro_batch + 1) * size]
        cp = decoder.strategy.cp
        documents = documents_of(rows[:, :-1], self._trainer.spec.train.document_end)
        output: torch.Tensor = decoder(cp.own_part(rows[:, :-1], 1) if hidden is None else hidden, documents)
        if decoder.final_norm is None:
            return output
        return decoder.loss_sum(output, cp.own_part(rows[:, 1:], 1)) / self._trainer.tokens

    def backward(
        self, action: Action, output: torch.Tensor, gradient: torch.Tensor | None, *, last: bool, split: bool
    ) -> None:
        chunk = action.chunk
        with self._trainer.doing("backward", chunk, action.micro_batch):
            self._turn(self._part.chunks[chunk], action.micro_batch)
            self._part.data_parallel.before_backward(self._local[chunk], last=last, split=split)
            torch.autograd.backward(output, gradient)

    def weights(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        weight_gradients = self._part.chunks[chunk].strategy.weight_gradients
        assert weight_gradients is not None
        with self._trainer.doing("weights", chunk, micro_batch):
            added = weight_gradients.add(micro_batch)
            self._part.data_parallel.weights_added(self._local[chunk], added, last=last)

    def leave(self, chunk: int) -> None:
        self._part.data_parallel.after_chunk(self._local[chunk])

    def _turn(self, decoder: Decoder, micro_batch: int) -> None:
        self._trainer.micro_batch = micro_batch
        if decoder.strategy.weight_gradients is not None:
            decoder.strategy.weight_gradients.micro_batch = micro_batch


Save = Callable[[int], None]
Stop = Callable[[int], bool]  # whether all ranks save and stop after so many steps


class Watch(Protocol):
    """Looks at a run from beside it, at steps from 0. `failed` says what is wrong, the same on all ranks."""

    failed: str

    @property
    def held_bytes(self) -> int:
        """Of tensors that it keeps until it looks again."""

    def looks(self, index: int) -> bool:
        """Whether it looks at a step at all."""

    def gradients(self, index: int) -> None:
        """Called in such a step, when gradients are complete and not clipped."""

    def updated(self, index: int, result: StepResult) -> None:
        """Called after it."""

    def stopping(self, done: int) -> None:
        """Called before a run that was asked to saves and stops after `done` steps."""

    def ended(self) -> None:
        """Called once there is no step left, nor a validation: what becomes of the weights is nobody's any more."""


class Look:
    """A watch's look into a step, and how long it took."""

    def __init__(self, recorder: Recorder, watch: Watch, index: int, peak: Peak | None = None) -> None:
        self._recorder, self.watch, self._index, self._peak = recorder, watch, index, peak
        self.seconds = 0.0

    def __call__(self) -> None:
        started = time.perf_counter()
        self._recorder.set_phase("proof")
        with self.aside():
            self.watch.gradients(self._index)
        self._recorder.set_phase("step")
        self.seconds = time.perf_counter() - started

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the watch holds meanwhile, and keeps, is in no peak."""
        if self._peak is not None:
            self._peak.pause()
        yield
        if self._peak is not None:
            self._peak.resume(self.watch.held_bytes)


def train(
    trainer: Trainer,
    send: Send,
    say: Callable[[str], None],
    done: int = 0,
    save: Save | None = None,
    watch: Watch | None = None,
    peak: Peak | None = None,
    start: StartReporter | None = None,
    stop: Stop | None = None,
) -> None:
    """Run the whole job: barrier, steps with validations between, verdict. `done` steps were done before.

    What a watch does is in no step's time, what it sends in no step's traffic, what it holds in no `peak`.
    """
    spec, recorder, rank = trainer.spec, trainer.recorder, trainer.mesh.rank

    def enter(phase: Phase) -> None:
        recorder.set_phase(phase)
        send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase=phase))

    if spec.layout.world_size > 1:
        barrier(trainer.device)
    steps = spec.train.steps
    if done == steps:
        peak = None  # of a step
    received: dict[Phase, int] = {"step": 0, "eval": 0}
    standing: Standing | None = None
    enter("step")
    for index in range(done, steps):
        recorder.set_phase("step")
        recorder.step = index + 1
        if peak is not None and index + 1 == steps:
            trainer.standing = standing = Standing(trainer.part, trainer.optimizer, peak, trainer.copies)
        look = Look(recorder, watch, index, peak) if watch is not None and watch.looks(index) else None
        recorder.begin_step(index + 1)
        started = time.perf_counter()
        result = trainer.step(index, look)
        elapsed = time.perf_counter() - started - (look.seconds if look is not None else 0.0)
        parts = recorder.end_step(index + 1)
        trainer.standing = None
        received["step"] += trainer.received_rows()
        send(_step_item(trainer, index, index + 1 - done, result, elapsed, parts))
        if start is not None:
            start.report("first step")
        if rank == 0:
            speed = trainer.tokens / elapsed
            say(f"step {index + 1}/{steps} loss {result.loss:.4f} norm {result.grad_norm:.3f} {speed:,.0f} tokens/s")
        stop_if(result.not_finite, index, spec.train)
        if look is not None:
            enter("proof")
            with look.aside():
                look.watch.updated(index, result)
            enter("step")
            if look.watch.failed and index + 1 < steps:
                raise ProofError(look.watch.failed)
        if _is_due(index + 1, spec.train.eval_every, steps):
            enter("eval")
            with recorder.time_span("eval"):
                loss = trainer.evaluate()
            received["eval"] += trainer.received_rows()
            if rank == 0:
                say(f"step {index + 1}/{steps} validation loss {loss:.4f}")
            if not math.isfinite(loss):
                stop_if(f"validation loss is {loss}", index, spec.train)
            elif rank == 0:
                send(EvalItem(kind="eval", rank=rank, time=time.time(), step=index + 1, loss=loss))
            enter("step")
        sound = watch is None or not watch.failed  # what is loaded again is one copy: that several differed is not seen
        saves = save is not None and sound and _is_due(index + 1, spec.train.checkpoint_every, steps)
        lasts = save is not None and stop is not None and index + 1 < steps and stop(index + 1)
        if lasts and watch is not None:
            enter("proof")
            watch.stopping(index + 1)
            enter("step")
            if watch.failed:
                raise ProofError(watch.failed)
        if save is not None and (saves or lasts):
            with recorder.time_span("checkpoint"):
                save(index + 1)
        if lasts:
            say(f"stopping after step {index + 1}/{steps}: the run was asked to save and stop")
            return
    if peak is not None:
        peak.read()
    memory = standing.told() if standing is not None else None
    if watch is not None:
        enter("proof")
        watch.ended()
    enter("teardown")
    rows = verdict(spec, rank, recorder.get_cells(), received, done)
    item = VerdictItem(kind="verdict", rank=rank, time=time.time(), rows=rows)
    if peak is not None:
        item["peak_bytes"] = max(0, peak.bytes)
    if memory is not None:
        item["memory"] = memory
    send(item)
    wrong_bytes = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows)
    wrong_calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows)
    total = sum(row["measured_bytes"] for row in rows)
    say(f"traffic check: measured {total:,} B, absolute difference {wrong_bytes:,} B, {wrong_calls} calls")
    if watch is not None and watch.failed:
        raise ProofError(watch.failed)


def _is_due(step: int, every: int, steps: int) -> bool:
    """Whether something done `every` so many steps, and after the last, comes after this one."""
    return bool(every) and (step % every == 0 or step == steps)


def _step_item(
    trainer: Trainer, index: int, ran: int, result: StepResult, elapsed: float, parts: StepBreakdown
) -> StepItem:
    spec = trainer.spec
    item = StepItem(
        kind="step",
        rank=trainer.mesh.rank,
        time=time.time(),
        step=index + 1,
        ran=ran,
        steps=spec.train.steps,
        step_s=elapsed,
        tokens=trainer.tokens,
        loss=_number(result.loss),
        grad_norm=_number(result.grad_norm),
        learning_rate=float(trainer.optimizer.param_groups[0]["lr"]),
        cells=trainer.recorder.get_cells("step"),
        parts=parts,
    )
    if result.not_finite:
        item["not_finite"] = result.not_finite
    return item


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class StepResult:
    """Global mean loss and gradient norm before clipping."""

    loss: float
    grad_norm: float

    @property
    def not_finite(self) -> str:
        """What of it is no number, in words; empty where all is."""
        named = (("loss", self.loss), ("gradient norm", self.grad_norm))
        return " and ".join(f"{name} is {value}" for name, value in named if not math.isfinite(value))


def stop_if(not_finite: str, index: int, train: TrainSpec) -> None:
    """End the run unless it is to go on with what is no number. All ranks know the same sums: all end, or none."""
    if not not_finite or train.on_not_finite == "continue":
        return
    rate = f"learning rate {train.learning_rate:g} ({learning_rate(index, train):.3g} at this step)"
    clip = f"gradient clip {train.grad_clip:g}" if train.grad_clip else "gradient clip off"
    raise DivergedError(f"{not_finite} at step {index + 1}; {rate}, {clip}, precision {train.precision}")
