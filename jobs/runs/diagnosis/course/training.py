"""Findings about the training: loss, gradient norm, replicas, and checkpoints."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from statistics import median

from contracts.telemetry.results import ProofItem
from contracts.telemetry.steps import CheckpointItem, StepItem
from jobs.core.verdict_schema import MOST_TROUBLE, Trouble
from jobs.runs.diagnosis.findings import Finding, cut, evidence, full_sentence, ranks_words

WINDOW = 50  # steps in the recent median
FEWEST = 20
DIVERGED = 3.0  # deviations above the recent median, for a loss that is also above the first loss
SPIKE = 10.0  # gradient norm over the recent median
MAD = 1.4826  # standard deviation over median absolute deviation, for normal noise


LOWER_RATE = "Lower the learning rate, or check the training data."
VALUES = {"nan": "NaN", "inf": "infinite", "-inf": "negative infinity"}


class Training:
    """Collects loss and gradient norm of rank 0, verification results, and checkpoints."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._first: float | None = None
        self._high = 0  # consecutive steps with a loss far above the recent median
        self._well, self._saved = 0, 0  # latest step with a normal loss, and latest step in a checkpoint
        self._trouble: dict[str, Trouble] = {}

    def step(self, item: StepItem) -> None:
        if "not_finite" in item:
            self._add("not finite", item["step"], f"{not_finite_words(item['not_finite'])} at step {item['step']}")
        loss, norm = item["loss"], item["grad_norm"]
        if loss is not None:
            self._loss(loss, item["step"])
            if not self._high and "not_finite" not in item:
                self._well = max(self._well, item["step"])
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= FEWEST else None
            if usual and norm > SPIKE * usual:
                text = (
                    f"gradient norm {norm:.3g} at step {item['step']} is {norm / usual:.0f} times "
                    f"the recent median of {usual:.3g}"
                )
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
                        f"loss {loss:.3g} at step {step} is above the first loss ({self._first:.3g}) "
                        f"and the recent median ({usual:.3g})"
                    )
                    self._add("diverged", step, text)
                return  # a high loss does not change the recent median
            self._high = 0
        self._losses.append(loss)

    def proof(self, item: ProofItem) -> None:
        for apart in item["wrong"][:1]:
            ranks = f" on {ranks_words(apart['ranks'])}" if apart["ranks"] else ""
            text = f"{apart['what']} of {apart['name']} differs from the single-process reference"
            if apart["axis"]:
                text = f"{apart['what']} of {apart['name']} differs between replicas over {apart['axis']}"
            self._add("replicas apart", 0, f"{text}{ranks}")

    def checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._saved = max(self._saved, item["step"])
        if item["problem"]:
            self._add(
                "checkpoint failed",
                item["step"],
                f"could not write the checkpoint after step {item['step']}: {item['problem']}",
            )

    def _add(self, kind: str, step: int, text: str) -> None:
        """Keep the latest problem of each kind."""
        self._trouble[kind] = {"kind": kind, "step": step, "text": cut(text)}  # type: ignore[typeddict-item]

    def _past(self, trouble: Trouble) -> bool:
        """Return whether the problem is over: later steps or checkpoints are normal."""
        if trouble["kind"] == "checkpoint failed":
            return self._saved > trouble["step"]
        return trouble["kind"] != "replicas apart" and self._well - trouble["step"] >= FEWEST

    def told(self) -> list[Trouble]:
        return list(self._trouble.values())[:MOST_TROUBLE]

    def findings(self) -> Iterator[Finding]:
        for trouble in self._trouble.values():
            if trouble["kind"] != "spike" and not self._past(trouble):
                yield _finding(trouble)


def not_finite_words(told: str) -> str:
    """Return 'the gradient norm is NaN' for 'gradient norm is nan'."""
    values = re.sub(r"\bis (nan|-?inf)\b", lambda found: f"is {VALUES[found[1]]}", told)
    return " and ".join(f"the {part}" for part in values.split(" and "))


def _finding(trouble: Trouble) -> Finding:
    text, step = trouble["text"], trouble["step"]
    facts = (evidence(text, (), (step,) if step else ()),)
    match trouble["kind"]:
        case "not finite":
            return Finding("failed", 1.0, f"Diverged: {text}.", "", LOWER_RATE, facts, "copy_job")
        case "diverged":
            reason = "The loss has stayed far above its recent median."
            following = "Resume from an earlier checkpoint with a lower learning rate."
            return Finding("failed", 1.0, f"Diverged: {text}.", reason, following, facts)
        case "replicas apart":
            reason = "The verification found a difference larger than rounding."
            return Finding(
                "failed", 1.0, f"Diverged: {text}.", reason, "Read the differences under Verification.", facts
            )
    reason = full_sentence(text.partition(": ")[2])
    sentence = f"Failed: the checkpoint after step {step} could not be written."
    following = "Free disk space on the host, or check its disk."
    return Finding("notice", 1.0, sentence, reason, following, facts, "open_log")
