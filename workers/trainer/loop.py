"""The training loop of one rank: steps, validations, and what is said about them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from contracts.telemetry import Axis, Cell, EvalItem, Item, Op, Phase, PhaseItem, StepItem, VerdictItem, VerdictRow
from planner.spec import JobSpec
from planner.traffic import Collective, eval_traffic, num_evals, setup_traffic, step_traffic
from workers.meter.recorder import Recorder
from workers.trainer.data import Corpus
from workers.trainer.mesh import Mesh
from workers.trainer.optimizer import clip_gradients, finish_gradients, learning_rate, make_optimizer, square_sum
from workers.trainer.parallelize import Part
from workers.trainer.pipeline_parallel import Boundary, actions, run_forward, run_step

Send = Callable[[Item], None]
Key = tuple[Phase, Op, Axis]


@dataclass(frozen=True)
class StepResult:
    """Global mean loss and gradient norm before clipping."""

    loss: float
    grad_norm: float


class Trainer:
    """One rank's model, optimiser and data, and the step they make."""

    def __init__(
        self, spec: JobSpec, mesh: Mesh, part: Part, corpus: Corpus, recorder: Recorder, device: torch.device
    ) -> None:
        self.spec, self.mesh, self.part, self.corpus, self.recorder = spec, mesh, part, corpus, recorder
        self.device = device
        self.optimizer = make_optimizer(part, spec.train)
        self.tokens = spec.train.global_batch * spec.train.seq_len
        seq_len = spec.train.seq_len // (spec.layout.tp if spec.layout.sequence_parallel else 1)
        shape = (spec.micro_batch_size, seq_len, spec.model.hidden_size)
        self._boundary = Boundary(mesh, shape, part.dtype, device)
        self._order = actions(spec.layout.schedule, mesh.place.pp, spec.layout.pp, spec.train.micro_batches)

    def step(self, index: int) -> StepResult:
        """Forward, backward and update of optimiser step `index` (from 0)."""
        self.backward(index)
        result = self._reduce_statistics()
        clip_gradients(self.part, result.grad_norm, self.spec.train.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.spec.train)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def backward(self, index: int) -> None:
        """All micro-batches of a step; gradients are complete and unclipped afterwards."""
        train, parallel = self.spec.train, self.part.data_parallel
        batch = self.corpus.train_batch(train.seed, index, train.global_batch, self._rows(), train.seq_len)
        forward = self._forward(torch.from_numpy(batch).to(self.device))
        self._loss = run_step(
            self._order, self.mesh, self._boundary, forward, lambda last: parallel.before_backward(last=last)
        )
        parallel.after_backward()
        finish_gradients(self.part, self.mesh)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over one global batch of held-out sequences, the same ones every time."""
        train = self.spec.train
        batch = self.corpus.eval_batch(train.seed, train.global_batch, self._rows(), train.seq_len)
        forward = self._forward(torch.from_numpy(batch).to(self.device))
        loss = run_forward(train.micro_batches, self.mesh, self._boundary, forward)
        self.part.data_parallel.after_eval()
        total = self._own_loss(loss).reshape(1)
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(total)
        return float(total)

    def _rows(self) -> slice:
        """This replica's rows of the global batch."""
        share = self.spec.train.global_batch // self.spec.layout.dp
        return slice(self.mesh.place.dp * share, (self.mesh.place.dp + 1) * share)

    def _forward(self, batch: torch.Tensor) -> Callable[[int, torch.Tensor | None], torch.Tensor]:
        size = self.spec.micro_batch_size

        def forward(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
            rows = batch[i * size : (i + 1) * size]
            output: torch.Tensor = self.part.decoder(rows[:, :-1] if hidden is None else hidden)
            if not self.mesh.is_last:
                return output
            return self.part.tp.loss_sum(output, rows[:, 1:]) / self.tokens

        return forward

    def _own_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """What this rank adds to the global mean: tp ranks of the last stage know the same loss."""
        share = torch.zeros((), device=self.device) if loss is None else loss / self.mesh.layout.tp
        return share.double()

    def _reduce_statistics(self) -> StepResult:
        statistics = torch.stack([square_sum(self.part, self.mesh), self._own_loss(self._loss)])
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(statistics)
        squares, loss = statistics.tolist()
        return StepResult(loss=loss, grad_norm=squares**0.5)


def train(trainer: Trainer, send: Send, say: Callable[[str], None]) -> None:
    """Run the whole job: barrier, steps with validations between, verdict."""
    spec, recorder, rank = trainer.spec, trainer.recorder, trainer.mesh.rank

    def enter(phase: Phase) -> None:
        recorder.set_phase(phase)
        send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase=phase))

    if spec.layout.world_size > 1:
        dist.barrier()
    steps = spec.train.steps
    enter("step")
    for index in range(steps):
        recorder.set_phase("step")
        recorder.step = index + 1
        started = time.perf_counter()
        result = trainer.step(index)
        elapsed = time.perf_counter() - started
        recorder.drain()
        send(_step_item(trainer, index, result, elapsed))
        if rank == 0:
            speed = trainer.tokens / elapsed
            say(f"step {index + 1}/{steps} loss {result.loss:.4f} norm {result.grad_norm:.3f} {speed:,.0f} tokens/s")
        if spec.train.eval_every and ((index + 1) % spec.train.eval_every == 0 or index + 1 == steps):
            enter("eval")
            loss = trainer.evaluate()
            if rank == 0:
                send(EvalItem(kind="eval", rank=rank, time=time.time(), step=index + 1, loss=loss))
                say(f"step {index + 1}/{steps} validation loss {loss:.4f}")
            enter("step")
    enter("teardown")
    rows = verdict(spec, rank, recorder.cells())
    send(VerdictItem(kind="verdict", rank=rank, time=time.time(), rows=rows))
    wrong_bytes = sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows)
    wrong_calls = sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows)
    total = sum(row["measured_bytes"] for row in rows)
    say(f"fidelity: measured {total:,} B, predicted minus measured {wrong_bytes:,} B, {wrong_calls} calls")


def _step_item(trainer: Trainer, index: int, result: StepResult, elapsed: float) -> StepItem:
    spec = trainer.spec
    return StepItem(
        kind="step",
        rank=trainer.mesh.rank,
        time=time.time(),
        step=index + 1,
        steps=spec.train.steps,
        step_s=elapsed,
        tokens=trainer.tokens,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=learning_rate(index, spec.train),
        cells=trainer.recorder.cells("step"),
    )


def verdict(spec: JobSpec, rank: int, cells: list[Cell]) -> list[VerdictRow]:
    """Compare what a finished run counted with what `planner.traffic` says, for every (phase, op, axis) of either."""
    predicted: dict[Key, tuple[int, int]] = {}
    phases: tuple[tuple[Phase, int, list[Collective]], ...] = (
        ("setup", 1, setup_traffic(spec, rank)),
        ("step", spec.train.steps, step_traffic(spec, rank)),
        ("eval", num_evals(spec), eval_traffic(spec, rank)),
    )
    for phase, times, collectives in phases:
        for c in collectives if times else []:
            count, payload = predicted.get((phase, c.op, c.axis), (0, 0))
            predicted[phase, c.op, c.axis] = count + times * c.count, payload + times * c.payload_bytes
    measured: dict[Key, tuple[int, int]] = {}
    for cell in cells:
        key = cell["phase"], cell["op"], cell["axis"]
        count, payload = measured.get(key, (0, 0))
        measured[key] = count + cell["count"], payload + cell["payload_bytes"]
    rows = []
    for key in sorted({*predicted, *measured}):
        (want_count, want_bytes), (got_count, got_bytes) = predicted.get(key, (0, 0)), measured.get(key, (0, 0))
        rows.append(
            VerdictRow(
                phase=key[0],
                op=key[1],
                axis=key[2],
                predicted_count=want_count,
                measured_count=got_count,
                predicted_bytes=want_bytes,
                measured_bytes=got_bytes,
            )
        )
    return rows
