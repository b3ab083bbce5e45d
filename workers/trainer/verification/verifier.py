"""Schedule the verification of a run, report its results, and fail the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from contracts.telemetry.batches import Item
from contracts.telemetry.results import Mismatch, ProofItem, ReferenceProof, ReplicaProof, RouterChoices
from planner.facts.single_process_reference import (
    BF16_TOLERANCES,
    COMPARED_STEPS,
    Tolerances,
    estimate_reference_seconds,
    explain_no_reference,
    format_tolerances,
    get_final_tolerances,
    get_num_final_batches,
    get_resumed_tolerances,
    get_tolerances,
    needs_fp32_reference,
)
from planner.facts.spec import JobSpec, Precision
from workers.rank_environment import get_group_timeout
from workers.trainer.memory import release_free_memory
from workers.trainer.trainer import StepResult, Trainer, raise_if_diverged
from workers.trainer.verification.comparison import (
    FirstStepTensors,
    ReferenceComparison,
    TrainedSteps,
    can_be_rounding,
    compare_with_reference,
    format_end_step,
    format_failure,
    format_fp32_reference,
    format_reference,
    format_replicas,
    format_retried_step,
    get_severity,
    run_on_rank_0,
)
from workers.trainer.verification.reference import (
    Fill,
    ReferenceRun,
    RoutingRecorder,
    allocate_moments,
    build_reference_trainer,
    compute_reference,
    continue_reference,
    gather_state,
)
from workers.trainer.verification.replicas import Kind, TensorShard, compare_batch_rows, compare_replicas, list_shards

ProofState = Literal["due", "not checked", "equal", "apart"]
MAX_MISMATCHES = 20
NO_STEP = "no steps left to train"


class RunVerifier:
    """Verify a run on one rank. Implements `workers.trainer.trainer.StepVerifier`.

    Replicas and batches are compared after the first and the last step. The first steps are compared with a
    single-process reference, and so is one extra step at the end. The traffic is counted in the phase "proof", and
    step times exclude it. `fill` loads the state that a resumed run started from.
    """

    def __init__(
        self,
        trainer: Trainer,
        send: Callable[[Item], None],
        log: Callable[[str], None],
        done: int = 0,
        fill: Fill | None = None,
    ) -> None:
        self.trainer, self._send, self._first, self._fill = trainer, send, done, fill
        self._log = log if trainer.mesh.rank == 0 else lambda _line: None
        # If the run stopped before all first steps were compared, their limits still apply.
        self._limits = get_resumed_tolerances(trainer.spec) if done >= COMPARED_STEPS else get_tolerances(trainer.spec)
        self._last = trainer.spec.train.steps - 1
        why = explain_no_reference(trainer.spec) or _explain_timeout(trainer.spec)
        # The first step that is not compared.
        self._last_compared = done if why else min(done + COMPARED_STEPS, self._last + 1)
        self._shards: list[TensorShard] = list_shards(trainer.spec, trainer.mesh.coordinates, trainer.model)
        self._first_step: FirstStepTensors | None = None
        self._routing = RoutingRecorder(trainer, on=done < self._last_compared)
        self._results: list[StepResult] = []
        self._wrong: list[Mismatch] = []
        self._not_finite = ""  # in the extra step
        self.failure = ""
        self._replicas = ReplicaProof(steps=[], parts=0, copied=0, apart=0.0)
        self._reference = _make_pending_proof(
            why or (NO_STEP if done > self._last else ""), self._last_compared, self._limits
        )
        # The extra step also compares the validation loss.
        validates = bool(trainer.spec.train.eval_every)
        ends = not why and (self._last_compared <= self._last or done > self._last or validates)
        self._end = _make_pending_proof("", self._last + 1, get_final_tolerances(trainer.spec)) if ends else None

    @property
    def retained_bytes(self) -> int:
        """Return the bytes of the first step and of recorded routing, until they are compared."""
        return (0 if self._first_step is None else self._first_step.num_bytes) + self._routing.num_bytes

    def verifies_step(self, index: int) -> bool:
        """Return whether a step (from 0) is inspected."""
        return index < max(self._last_compared, self._first + COMPARED_STEPS) or index == self._last

    def check_gradients(self, index: int) -> None:
        """Inspect a step when gradients are complete and clipped."""
        if index in (self._first, self._last):
            self._compare("gradient", lambda shard: shard.gradient)
            self._compare_rows(index)
        if index < self._last_compared:
            self._routing.end_step()
        if index == self._first < self._last_compared:
            self._first_step = FirstStepTensors([shard.gradient.clone() for shard in self._shards], [])

    def check_update(self, index: int, result: StepResult) -> None:
        """Inspect a step after its update. Mismatches fail the run after the first or the last steps."""
        compared = index in (self._first, self._last)
        if compared:
            self._compare("weight", lambda shard: shard.weight)
            self._replicas["steps"].append(index + 1)
        if index < self._last_compared and result.not_finite:
            self._last_compared, self._first_step = self._first, None
            self._routing.drop()
            self._reference["state"], self._reference["why"] = "not checked", f"{result.not_finite} at step {index + 1}"
        if index < self._last_compared:
            self._results.append(result)
            if self._first_step is not None and index == self._first:
                self._first_step.weights.extend(shard.weight.clone() for shard in self._shards)
        compares = self._first < self._last_compared == index + 1
        if compares:
            self._compare_first()
            release_free_memory()
        if self._reference["state"] in ("not checked", "apart"):
            self._end = None
        if compared or compares:
            self._report()
        if self._wrong and (index == self._last or index >= self._first + COMPARED_STEPS - 1):
            self.failure = format_failure(self._wrong)

    def check_before_stop(self, done: int) -> None:
        """Compare replicas before a save and stop, because a checkpoint contains only one replica."""
        self._compare("weight", lambda shard: shard.weight)
        self._replicas["steps"].append(done)
        self._report()
        if self._wrong:
            self.failure = format_failure(self._wrong)

    def check_end(self) -> None:
        """Run one extra step, and compare it with a reference that starts from the state of the run.

        If the mismatches can be rounding of the batch, another step follows with the next batch. Raises DivergedError.
        """
        if self._end is None:
            return
        done = self._last + 1
        self._end, wrong = self._run_extra_step(done)
        for more in range(1, get_num_final_batches(self.trainer.spec)):
            if not can_be_rounding(wrong):
                break
            release_free_memory()  # the previous reference
            extra, beyond = self._run_extra_step(done + more)
            if extra["state"] == "not checked":
                break
            extra["why"] += f"; {format_retried_step(done + more, wrong)}"
            self._end, wrong = extra, beyond
        self._wrong += wrong
        self._report()
        if self._wrong:
            self.failure = format_failure(self._wrong)
        if self._not_finite:
            raise_if_diverged(self._not_finite, self._last + 1, self.trainer.spec.train)

    def _compare(self, what: Kind, value_of: Callable[[TensorShard], torch.Tensor]) -> None:
        trainer = self.trainer
        found = compare_replicas(what, trainer.spec, trainer.mesh, self._shards, value_of, self._limits.replicas)
        self._replicas["parts"], self._replicas["copied"] = found.parts, found.replicated
        self._replicas["apart"] = max(self._replicas["apart"], found.apart)
        self._wrong += found.wrong

    def _compare_rows(self, index: int) -> None:
        trainer = self.trainer
        assert trainer.batch is not None
        self._wrong += compare_batch_rows(
            trainer.spec, trainer.mesh, trainer.dataset, trainer.batch, index, trainer.device
        )

    def _compare_first(self) -> None:
        trainer, first_step, done = self.trainer, self._first_step, self._first
        assert first_step is not None
        self._first_step = None
        ran = TrainedSteps(done, first_step, self._results)
        spec, dataset, steps = trainer.spec, trainer.dataset, len(self._results)
        routing = self._routing.take()
        computed = partial(compute_reference, spec, dataset, trainer.device, steps, done, self._fill, routing)
        self._reference, wrong = self._compare_with_reference(ran, computed, self._limits)
        self._wrong += wrong
        if done or self._reference["state"] == "not checked" or not needs_fp32_reference(spec):
            return
        release_free_memory()  # the previous reference
        exact, wrong = self._compare_with_reference(ran, partial(computed, precision="fp32"), BF16_TOLERANCES, "fp32")
        self._wrong += [{**apart, "name": f"{apart['name']} in fp32"} for apart in wrong]
        self._reference["why"] += f"; {format_fp32_reference(exact)}"
        self._reference["seconds"] += exact["seconds"]
        if wrong:
            self._reference["state"] = "apart"

    def _run_extra_step(self, done: int) -> tuple[ReferenceProof, Sequence[Mismatch]]:
        """Return the result and the mismatches of the step after `done` steps."""
        trainer = self.trainer
        trainer.recorder.close_trace()  # Later records do not belong to the last step.
        spec, corpus, device = trainer.spec, trainer.dataset, trainer.device
        limits_used = get_final_tolerances(spec)

        def build() -> Trainer:
            reference = build_reference_trainer(spec, corpus, device)
            allocate_moments(reference, done)
            return reference

        reference, failed = run_on_rank_0(trainer.mesh, build, device)
        if failed:
            return _make_pending_proof(failed, 1, limits_used), []
        gather_state(trainer, self._shards, reference)
        first = FirstStepTensors([], [])
        self._routing.on = True
        result = trainer.train_step(
            done, lambda: first.gradients.extend(shard.gradient.clone() for shard in self._shards)
        )
        first.weights.extend(shard.weight for shard in self._shards)
        self._routing.end_step()
        routing = self._routing.take()
        if result.not_finite:
            self._not_finite = f"{result.not_finite} in the extra final step"
            return _make_pending_proof(self._not_finite, 1, limits_used), []
        validation = trainer.last_eval_loss if done == self._last + 1 else None

        def computed() -> ReferenceRun:
            assert reference is not None
            return continue_reference(reference, 1, done, routing, validates=validation is not None)

        return self._compare_with_reference(TrainedSteps(done, first, [result], validation), computed, limits_used)

    def _compare_with_reference(
        self,
        ran: TrainedSteps,
        computed: Callable[[], ReferenceRun],
        limits_used: Tolerances,
        precision: Precision | None = None,
    ) -> tuple[ReferenceProof, Sequence[Mismatch]]:
        trainer, started = self.trainer, time.perf_counter()
        found = compare_with_reference(
            trainer.spec, trainer.mesh, self._shards, ran, computed, limits_used, trainer.device
        )
        limits = format_tolerances(trainer.spec, limits_used, precision or trainer.spec.train.precision)
        state: ProofState = "not checked" if found.failed else "apart" if found.wrong else "equal"
        why = found.failed or "; ".join(filter(None, (limits, found.noted)))
        return _make_proof(state, why, found, limits_used, time.perf_counter() - started), found.wrong

    def _report(self) -> None:
        mesh = self.trainer.mesh
        parts = [format_replicas(self._replicas, self._wrong), format_reference(self._reference)]
        if self._end is not None and self._end["state"] != "due":
            parts.append(format_end_step(self._end))
        self._log(f"verification: {'; '.join(parts)}")
        if mesh.rank == 0:
            wrong = sorted(self._wrong, key=get_severity, reverse=True)[:MAX_MISMATCHES]
            replicas = ReplicaProof(**{**self._replicas, "steps": [*self._replicas["steps"]]})
            item = ProofItem(
                kind="proof", rank=0, time=time.time(), replicas=replicas, one_process=self._reference, wrong=wrong
            )
            if self._end is not None:
                item["end"] = self._end
            self._send(item)


def _explain_timeout(spec: JobSpec) -> str:
    """Return why the reference takes too long for the other ranks, or an empty text."""
    seconds, waits_s = estimate_reference_seconds(spec), get_group_timeout().total_seconds()
    if spec.layout.world_size == 1 or seconds <= waits_s / 2:
        return ""
    return f"the reference would take about {seconds:,.0f} s, and ranks wait at most {waits_s:g} s on this host"


def _make_pending_proof(why: str, steps: int, limits: Tolerances) -> ReferenceProof:
    """Return a proof that is due after `steps` steps, or not checked because of `why`."""
    return _make_proof("not checked" if why else "due", why, ReferenceComparison(steps), limits, 0.0)


def _make_proof(
    state: ProofState, why: str, found: ReferenceComparison, limits: Tolerances, seconds: float
) -> ReferenceProof:
    proof = ReferenceProof(
        state=state,
        why=why,
        steps=found.steps,
        tensors=found.tensors,
        gradient=found.gradient,
        update=found.update,
        loss=found.loss,
        norm=found.norm,
        limit=limits.gradient,
        seconds=seconds,
    )
    if found.choices.tokens:
        tokens, turned, gaps = found.choices
        gap = max(filter(math.isfinite, gaps), default=0.0)
        proof["choices"] = RouterChoices(tokens=tokens, turned=turned, gap=gap)
    return proof
