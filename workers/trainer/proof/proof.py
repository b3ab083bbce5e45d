"""When a run is looked at, what is said about it, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from contracts.telemetry.batches import Item
from contracts.telemetry.proof import Mismatch, ProcessProof, ProofItem, ReplicaProof
from planner.facts.proof import STEPS, limits, limits_words, why_not_compared
from workers.trainer.allocator import give_back
from workers.trainer.loop import StepResult, Trainer
from workers.trainer.proof.one_process import Beside, FirstStep, compare_with_one
from workers.trainer.proof.parts import Piece, pieces_of
from workers.trainer.proof.replicas import Kind, compare_copies
from workers.trainer.proof.words import gravity, one_process_words, replica_words, wrong_words

MOST_WRONG = 20


class Proof:
    """Of one run, on one rank: what `workers.trainer.loop.Watch` asks for.

    After the first and the last step of this run, copies are compared over ranks; after the first few, those are
    compared with one process. All that is sent for it is counted in the phase "proof", and no step's time holds any.
    """

    def __init__(
        self, trainer: Trainer, send: Callable[[Item], None], say: Callable[[str], None], done: int = 0
    ) -> None:
        self.trainer, self._send, self._first = trainer, send, done
        self._say = say if trainer.mesh.rank == 0 else lambda _line: None
        self._limits = limits(trainer.spec)
        steps = trainer.spec.train.steps
        why = "it goes on from a checkpoint" if done else why_not_compared(trainer.spec)
        self._compared = 0 if why else min(STEPS, steps)
        self._last = steps - 1
        self._pieces: list[Piece] = pieces_of(trainer.spec, trainer.mesh.place, trainer.part)
        self._kept: FirstStep | None = None
        self._results: list[StepResult] = []
        self._wrong: list[Mismatch] = []
        self.failed = ""
        self._replicas = ReplicaProof(steps=[], parts=0, copied=0, apart=0.0)
        self._one = ProcessProof(
            state="not checked" if why else "due",
            why=why,
            steps=self._compared,
            tensors=0,
            gradient=0.0,
            update=0.0,
            loss=0.0,
            norm=0.0,
            limit=self._limits.gradient,
            seconds=0.0,
        )

    @property
    def held_bytes(self) -> int:
        """Of this rank's own first step, until it is compared."""
        kept = [] if self._kept is None else [*self._kept.gradients, *self._kept.weights]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def looks(self, index: int) -> bool:
        """Whether there is anything to do at step `index` (from 0)."""
        return index < max(self._compared, self._first + STEPS) or index == self._last

    def gradients(self, index: int) -> None:
        """In such a step, when gradients are complete and not clipped."""
        if index in (self._first, self._last):
            self._compare("gradient", lambda piece: piece.gradient)
        if self._compared and index == 0:
            self._kept = FirstStep([piece.gradient.clone() for piece in self._pieces], [])

    def updated(self, index: int, result: StepResult) -> None:
        """After it. What is wrong is told once all is known of the first steps, or of the last."""
        looked = index in (self._first, self._last)
        if looked:
            self._compare("weight", lambda piece: piece.weight)
            self._replicas["steps"].append(index + 1)
        if index < self._compared and result.not_finite:
            self._compared, self._kept = 0, None
            self._one["state"], self._one["why"] = "not checked", f"{result.not_finite} at step {index + 1}"
        if index < self._compared:
            self._results.append(result)
            if self._kept is not None and not index:
                self._kept.weights.extend(piece.weight.clone() for piece in self._pieces)
        compares = bool(self._compared) and index == self._compared - 1
        if compares:
            self._compare_with_one()
        if looked or compares:
            self._tell()
        if self._wrong and (index == self._last or index >= self._first + STEPS - 1):
            self.failed = wrong_words(self._wrong)

    def _compare(self, what: Kind, value_of: Callable[[Piece], torch.Tensor]) -> None:
        trainer = self.trainer
        found = compare_copies(what, trainer.spec, trainer.mesh, self._pieces, value_of, self._limits.copies)
        self._replicas["parts"], self._replicas["copied"] = found.parts, found.copied
        self._replicas["apart"] = max(self._replicas["apart"], found.apart)
        self._wrong += found.wrong

    def _compare_with_one(self) -> None:
        trainer, kept, started = self.trainer, self._kept, time.perf_counter()
        assert kept is not None
        found = compare_with_one(
            trainer.spec,
            trainer.mesh,
            trainer.corpus,
            self._pieces,
            kept,
            self._results,
            self._limits,
            trainer.device,
        )
        self._kept = None
        del kept
        give_back()
        self._wrong += found.wrong
        self._one = self._told(found, time.perf_counter() - started)

    def _told(self, found: Beside, seconds: float) -> ProcessProof:
        state = "not checked" if found.failed else "apart" if found.wrong else "equal"
        return ProcessProof(
            state=state,  # type: ignore[typeddict-item]  # one of the four
            why=found.failed or "; ".join(filter(None, (limits_words(self.trainer.spec), found.cut))),
            steps=found.steps,
            tensors=found.tensors,
            gradient=found.gradient,
            update=found.update,
            loss=found.loss,
            norm=found.norm,
            limit=self._limits.gradient,
            seconds=seconds,
        )

    def _tell(self) -> None:
        mesh = self.trainer.mesh
        self._say(f"proof: {replica_words(self._replicas, self._wrong)}; {one_process_words(self._one)}")
        if mesh.rank == 0:
            wrong = sorted(self._wrong, key=gravity, reverse=True)[:MOST_WRONG]
            replicas = ReplicaProof(**{**self._replicas, "steps": [*self._replicas["steps"]]})
            self._send(
                ProofItem(kind="proof", rank=0, time=time.time(), replicas=replicas, one_process=self._one, wrong=wrong)
            )
