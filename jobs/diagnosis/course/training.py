"""What is wrong with the training itself: its loss, its norm, its copies, its checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median

from contracts.telemetry.proof import ProofItem
from contracts.telemetry.steps import CheckpointItem, StepItem
from jobs.diagnosis.findings import Finding, cut, evidence
from jobs.diagnosis.shapes import MOST_TROUBLE, Trouble

WINDOW = 50  # steps that a loss is compared with
FEWEST = 20
DIVERGED = 3.0  # deviations of the window above its median, and above the first loss: it learns nothing any more
SPIKE = 10.0  # times the median norm
MAD = 1.4826  # a deviation of normal noise over the median of absolute ones


class Training:
    """Loss and norm of rank 0's steps, and what else was told of the training."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._first: float | None = None
        self._high = 0  # steps in a row whose loss is far above what it was
        self._well, self._saved = 0, 0  # the newest step that was as it should be, and that is in a checkpoint
        self._trouble: dict[str, Trouble] = {}

    def step(self, item: StepItem) -> None:
        if "not_finite" in item:
            self._add("not finite", item["step"], f"{item['not_finite']} in step {item['step']}")
        loss, norm = item["loss"], item["grad_norm"]
        if loss is not None:
            self._loss(loss, item["step"])
            if not self._high and "not_finite" not in item:
                self._well = max(self._well, item["step"])
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= FEWEST else None
            if usual and norm > SPIKE * usual:
                text = f"gradient norm {norm:.3g} in step {item['step']}, {norm / usual:.0f} times {usual:.3g} of late"
                self._add("spike", item["step"], text)
            self._norms.append(norm)

    def _loss(self, loss: float, step: int) -> None:
        if self._first is None:
            self._first = loss
        if len(self._losses) >= FEWEST:
            usual = median(self._losses)
            spread = MAD * median(abs(x - usual) for x in self._losses)
            if loss > self._first and loss > usual + DIVERGED * max(spread, 0.01 * abs(usual)):
                self._high += 1
                if self._high >= FEWEST // 2:
                    text = (
                        f"loss {loss:.3g} in step {step}, above the first, {self._first:.3g}, and {usual:.3g} of late"
                    )
                    self._add("diverged", step, text)
                return  # it does not become the usual
            self._high = 0
        self._losses.append(loss)

    def proof(self, item: ProofItem) -> None:
        for apart in item["wrong"][:1]:
            ranks = f" on {' and '.join(f'rank {rank}' for rank in apart['ranks'])}" if apart["ranks"] else ""
            text = f"{apart['what']} {apart['name']} differs over {apart['axis'] or 'one process'}{ranks}"
            self._add("replicas apart", 0, text)

    def checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._saved = max(self._saved, item["step"])
        if item["problem"]:
            self._add("checkpoint failed", item["step"], f"after step {item['step']}: {item['problem']}")

    def _add(self, kind: str, step: int, text: str) -> None:
        """The latest of each kind."""
        self._trouble[kind] = {"kind": kind, "step": step, "text": cut(text)}  # type: ignore[typeddict-item]

    def _past(self, trouble: Trouble) -> bool:
        """Whether it came, and all has been well again since."""
        if trouble["kind"] == "checkpoint failed":
            return self._saved > trouble["step"]
        return trouble["kind"] != "replicas apart" and self._well - trouble["step"] >= FEWEST

    def told(self) -> list[Trouble]:
        return list(self._trouble.values())[:MOST_TROUBLE]

    def findings(self) -> Iterator[Finding]:
        words = {
            "not finite": ("failed", "The {} is no number any more", "lower the learning rate, or look at the data"),
            "diverged": ("failed", "The training has diverged", "go on from a checkpoint with a lower learning rate"),
            "replicas apart": ("failed", "Ranks that must hold the same do not", "look at the proof below"),
            "checkpoint failed": ("notice", "A checkpoint could not be written", "make room, or look at its disk"),
        }
        for trouble in self._trouble.values():
            if trouble["kind"] in words and not self._past(trouble):
                state, sentence, following = words[trouble["kind"]]
                sentence = sentence.format(trouble["text"].partition(" is ")[0])
                steps = (trouble["step"],) if trouble["step"] else ()
                yield Finding(state, 1.0, sentence, trouble["text"], following, (evidence(trouble["text"], (), steps),))  # type: ignore[arg-type]
