"""When a run is looked at, what is said about it, and what ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from contracts.telemetry.batches import Item
from contracts.telemetry.results import Mismatch, ProofItem, ReferenceProof, ReplicaProof, RouterChoices
from planner.facts.single_process_reference import (
    COMPARED_STEPS,
    Tolerances,
    estimate_reference_seconds,
    explain_no_reference,
    format_tolerances,
    get_final_tolerances,
    get_num_final_batches,
    get_resumed_tolerances,
    get_tolerances,
)
from planner.facts.spec import JobSpec
from workers.rank_environment import get_group_timeout
from workers.trainer.allocator import give_back
from workers.trainer.trainer import StepResult, Trainer, stop_if
from workers.trainer.verification.comparison import Beside, FirstStep, Ran, compare_with_one, on_rank_0
from workers.trainer.verification.messages import (
    batch_words,
    end_words,
    gravity,
    may_be_its_batch,
    one_process_words,
    replica_words,
    wrong_words,
)
from workers.trainer.verification.reference import Fill, Reference, compute, gather_state, go_on, make_room, one_trainer
from workers.trainer.verification.replicas import Kind, compare_copies, compare_rows
from workers.trainer.verification.routing import Chosen
from workers.trainer.verification.shards import Piece, pieces_of

MOST_WRONG = 20
NO_STEP = "no steps left to train"


class Proof:
    """Of one run, on one rank: what `workers.trainer.trainer.Watch` asks for.

    After the first and the last step of this run, copies and the rows trained on are compared over ranks; after the
    first few, those are compared with one process, and so is one step more when the run has ended. All that is sent for
    it is counted in the phase "proof", and no step's time holds any. `restored` gives one process what a run that goes
    on began with.
    """

    def __init__(
        self,
        trainer: Trainer,
        send: Callable[[Item], None],
        say: Callable[[str], None],
        done: int = 0,
        restored: Fill | None = None,
    ) -> None:
        self.trainer, self._send, self._first, self._restored = trainer, send, done, restored
        self._say = say if trainer.mesh.rank == 0 else lambda _line: None
        # Where it stopped before these steps were compared, they are held to what they would have been.
        self._limits = get_resumed_tolerances(trainer.spec) if done >= COMPARED_STEPS else get_tolerances(trainer.spec)
        self._last = trainer.spec.train.steps - 1
        why = explain_no_reference(trainer.spec) or _too_long(trainer.spec)
        self._until = done if why else min(done + COMPARED_STEPS, self._last + 1)  # steps before it are compared
        self._pieces: list[Piece] = pieces_of(trainer.spec, trainer.mesh.place, trainer.part)
        self._kept: FirstStep | None = None
        self._chosen = Chosen(trainer, on=done < self._until)
        self._results: list[StepResult] = []
        self._wrong: list[Mismatch] = []
        self._not_finite = ""  # in the step more
        self.failed = ""
        self._replicas = ReplicaProof(steps=[], parts=0, copied=0, apart=0.0)
        self._one = _not_yet(why or (NO_STEP if done > self._last else ""), self._until, self._limits)
        ends = not why and (self._until <= self._last or done > self._last)
        self._end = _not_yet("", self._last + 1, get_final_tolerances(trainer.spec)) if ends else None

    @property
    def held_bytes(self) -> int:
        """What is kept of the first step, and of routers' choices, until they are compared."""
        return (0 if self._kept is None else self._kept.num_bytes) + self._chosen.num_bytes

    def looks(self, index: int) -> bool:
        """Whether there is anything to do at step `index` (from 0)."""
        return index < max(self._until, self._first + COMPARED_STEPS) or index == self._last

    def gradients(self, index: int) -> None:
        """In such a step, when gradients are complete and not clipped."""
        if index in (self._first, self._last):
            self._compare("gradient", lambda piece: piece.gradient)
            self._compare_rows(index)
        if index < self._until:
            self._chosen.end_step()
        if index == self._first < self._until:
            self._kept = FirstStep([piece.gradient.clone() for piece in self._pieces], [])

    def updated(self, index: int, result: StepResult) -> None:
        """After it. What is wrong is told once all is known of the first steps, or of the last."""
        looked = index in (self._first, self._last)
        if looked:
            self._compare("weight", lambda piece: piece.weight)
            self._replicas["steps"].append(index + 1)
        if index < self._until and result.not_finite:
            self._until, self._kept = self._first, None
            self._chosen.drop()
            self._one["state"], self._one["why"] = "not checked", f"{result.not_finite} at step {index + 1}"
        if index < self._until:
            self._results.append(result)
            if self._kept is not None and index == self._first:
                self._kept.weights.extend(piece.weight.clone() for piece in self._pieces)
        compares = self._first < self._until == index + 1
        if compares:
            self._compare_first()
            give_back()
        if self._one["state"] in ("not checked", "apart"):
            self._end = None
        if looked or compares:
            self._tell()
        if self._wrong and (index == self._last or index >= self._first + COMPARED_STEPS - 1):
            self.failed = wrong_words(self._wrong)

    def stopping(self, done: int) -> None:
        """Before a run saves and stops: what is loaded again is one copy, and no other is seen any more."""
        self._compare("weight", lambda piece: piece.weight)
        self._replicas["steps"].append(done)
        self._tell()
        if self._wrong:
            self.failed = wrong_words(self._wrong)

    def ended(self) -> None:
        """One step more, which nothing comes of, by the run and by one process from what the run has come to.

        Raises:
            DivergedError: it is no number, and a run ends at what is none.

        Where what is beyond a limit may be rounding of its batch, another with the next.
        """
        if self._end is None:
            return
        done = self._last + 1
        self._end, wrong = self._one_more(done)
        for more in range(1, get_num_final_batches(self.trainer.spec)):
            if not may_be_its_batch(wrong):
                break
            give_back()  # the one process before
            told, beyond = self._one_more(done + more)
            if told["state"] == "not checked":
                break
            told["why"] += f"; {batch_words(done + more, wrong)}"
            self._end, wrong = told, beyond
        self._wrong += wrong
        self._tell()
        if self._wrong:
            self.failed = wrong_words(self._wrong)
        if self._not_finite:
            stop_if(self._not_finite, self._last + 1, self.trainer.spec.train)

    def _compare(self, what: Kind, value_of: Callable[[Piece], torch.Tensor]) -> None:
        trainer = self.trainer
        found = compare_copies(what, trainer.spec, trainer.mesh, self._pieces, value_of, self._limits.replicas)
        self._replicas["parts"], self._replicas["copied"] = found.parts, found.copied
        self._replicas["apart"] = max(self._replicas["apart"], found.apart)
        self._wrong += found.wrong

    def _compare_rows(self, index: int) -> None:
        trainer = self.trainer
        assert trainer.rows is not None
        self._wrong += compare_rows(trainer.spec, trainer.mesh, trainer.corpus, trainer.rows, index, trainer.device)

    def _compare_first(self) -> None:
        trainer, kept, done = self.trainer, self._kept, self._first
        assert kept is not None
        self._kept = None
        ran = Ran(done, kept, self._results)
        chosen = self._chosen.take()
        computed = partial(
            compute, trainer.spec, trainer.corpus, trainer.device, len(self._results), done, self._restored, chosen
        )
        self._one, wrong = self._beside(ran, computed, self._limits)
        self._wrong += wrong

    def _one_more(self, done: int) -> tuple[ReferenceProof, Sequence[Mismatch]]:
        """A step after the first `done`, and what is wrong of it. The last validation was after the run's own last."""
        trainer = self.trainer
        trainer.recorder.close_trace()  # what comes now is none of the last step's
        spec, corpus, device, most = trainer.spec, trainer.corpus, trainer.device, get_final_tolerances(trainer.spec)

        def build() -> Trainer:
            one = one_trainer(spec, corpus, device, trained=True)
            make_room(one, done)
            return one

        one, failed = on_rank_0(trainer.mesh, build, device)
        if failed:
            return _not_yet(failed, 1, most), []
        gather_state(trainer, self._pieces, one)
        first = FirstStep([], [])
        self._chosen.on = True
        result = trainer.step(done, lambda: first.gradients.extend(piece.gradient.clone() for piece in self._pieces))
        first.weights.extend(piece.weight for piece in self._pieces)
        self._chosen.end_step()
        chosen = self._chosen.take()
        if result.not_finite:
            self._not_finite = f"{result.not_finite} in the extra final step"
            return _not_yet(self._not_finite, 1, most), []
        validation = trainer.validation if done == self._last + 1 else None

        def computed() -> Reference:
            assert one is not None
            return go_on(one, 1, done, chosen, validates=validation is not None)

        return self._beside(Ran(done, first, [result], validation), computed, most)

    def _beside(
        self, ran: Ran, computed: Callable[[], Reference], most: Tolerances
    ) -> tuple[ReferenceProof, Sequence[Mismatch]]:
        trainer, started = self.trainer, time.perf_counter()
        found = compare_with_one(trainer.spec, trainer.mesh, self._pieces, ran, computed, most, trainer.device)
        words = format_tolerances(trainer.spec, most, trained=ran.done > 0)
        return _told(found, most, words, time.perf_counter() - started), found.wrong

    def _tell(self) -> None:
        mesh = self.trainer.mesh
        parts = [replica_words(self._replicas, self._wrong), one_process_words(self._one)]
        if self._end is not None and self._end["state"] != "due":
            parts.append(end_words(self._end))
        self._say(f"verification: {'; '.join(parts)}")
        if mesh.rank == 0:
            wrong = sorted(self._wrong, key=gravity, reverse=True)[:MOST_WRONG]
            replicas = ReplicaProof(**{**self._replicas, "steps": [*self._replicas["steps"]]})
            item = ProofItem(
                kind="proof", rank=0, time=time.time(), replicas=replicas, one_process=self._one, wrong=wrong
            )
            if self._end is not None:
                item["end"] = self._end
            self._send(item)


def _too_long(spec: JobSpec) -> str:
    """Why the others would not wait for one process on this host; empty where they would."""
    seconds, waits_s = estimate_reference_seconds(spec), get_group_timeout().total_seconds()
    if spec.layout.world_size == 1 or seconds <= waits_s / 2:
        return ""
    return f"the reference would take about {seconds:,.0f} s, and ranks wait at most {waits_s:g} s on this host"


def _not_yet(why: str, steps: int, most: Tolerances) -> ReferenceProof:
    """Due after so many steps, or why it is never."""
    return ReferenceProof(
        state="not checked" if why else "due",
        why=why,
        steps=steps,
        tensors=0,
        gradient=0.0,
        update=0.0,
        loss=0.0,
        norm=0.0,
        limit=most.gradient,
        seconds=0.0,
    )


def _told(found: Beside, most: Tolerances, words: str, seconds: float) -> ReferenceProof:
    state = "not checked" if found.failed else "apart" if found.wrong else "equal"
    told = ReferenceProof(
        state=state,  # type: ignore[typeddict-item]  # one of the four
        why=found.failed or "; ".join(filter(None, (words, found.noted))),
        steps=found.steps,
        tensors=found.tensors,
        gradient=found.gradient,
        update=found.update,
        loss=found.loss,
        norm=found.norm,
        limit=most.gradient,
        seconds=seconds,
    )
    if found.choices.tokens:
        tokens, turned, gaps = found.choices
        told["choices"] = RouterChoices(tokens=tokens, turned=turned, gap=max(filter(math.isfinite, gaps), default=0.0))
    return told
