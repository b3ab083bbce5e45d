"""Find problems of the training: loss, gradient norm, replicas, and checkpoints."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from statistics import median

from contracts.telemetry.results import ProofItem
from contracts.telemetry.steps import CheckpointItem, StepItem
from jobs.core.verdict_schema import MAX_TROUBLES, Trouble
from jobs.runs.diagnosis.findings import Finding, format_ranks, make_evidence, make_sentence, truncate

WINDOW_STEPS = 50  # in the recent median
MIN_STEPS = 20
DIVERGED_DEVIATIONS = 3.0  # above the recent median, for a loss that is also above the first loss
SPIKE_FACTOR = 10.0  # gradient norm over the recent median
DEVIATION_PER_MAD = 1.4826  # standard deviation over median absolute deviation, for normal noise


LOWER_RATE = "Lower the learning rate, or check the training data."
VALUES = {"nan": "NaN", "inf": "infinite", "-inf": "negative infinity"}


class TrainingHealth:
    """Collect loss and gradient norm of rank 0, verification results, and checkpoints."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._norms: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._first: float | None = None
        self._high = 0  # consecutive steps with a loss far above the recent median
        self._last_normal, self._last_saved = 0, 0  # latest step with a normal loss, and latest step in a checkpoint
        self._trouble: dict[str, Trouble] = {}

    def add_step(self, item: StepItem) -> None:
        if "not_finite" in item:
            self._add("not finite", item["step"], f"{format_not_finite(item['not_finite'])} at step {item['step']}")
        loss, norm = item["loss"], item["grad_norm"]
        if loss is not None:
            self._add_loss(loss, item["step"])
            if not self._high and "not_finite" not in item:
                self._last_normal = max(self._last_normal, item["step"])
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= MIN_STEPS else None
            if usual and norm > SPIKE_FACTOR * usual:
                text = (
                    f"gradient norm {norm:.3g} at step {item['step']} is {norm / usual:.0f} times "
                    f"the recent median of {usual:.3g}"
                )
                self._add("spike", item["step"], text)
            self._norms.append(norm)

    def _add_loss(self, loss: float, step: int) -> None:
        if self._first is None:
            self._first = loss
        if len(self._losses) >= MIN_STEPS:
            usual = median(self._losses)
            spread = DEVIATION_PER_MAD * median(abs(x - usual) for x in self._losses)
            if loss > self._first and loss > usual + DIVERGED_DEVIATIONS * max(spread, 0.01 * abs(usual)):
                self._high += 1
                if self._high >= MIN_STEPS // 2:
                    text = (
                        f"loss {loss:.3g} at step {step} is above the first loss ({self._first:.3g}) "
                        f"and the recent median ({usual:.3g})"
                    )
                    self._add("diverged", step, text)
                return  # a high loss does not change the recent median
            self._high = 0
        self._losses.append(loss)

    def add_proof(self, item: ProofItem) -> None:
        for difference in item["wrong"][:1]:
            ranks = f" on {format_ranks(difference['ranks'])}" if difference["ranks"] else ""
            text = f"{difference['what']} of {difference['name']} differs from the single-process reference"
            if difference["axis"]:
                text = (
                    f"{difference['what']} of {difference['name']} differs between replicas over {difference['axis']}"
                )
            self._add("replicas apart", 0, f"{text}{ranks}")

    def add_checkpoint(self, item: CheckpointItem) -> None:
        if item["name"] is not None:
            self._last_saved = max(self._last_saved, item["step"])
        if item["problem"]:
            self._add(
                "checkpoint failed",
                item["step"],
                f"could not write the checkpoint after step {item['step']}: {item['problem']}",
            )

    def _add(self, kind: str, step: int, text: str) -> None:
        """Store the latest problem of each kind."""
        self._trouble[kind] = {"kind": kind, "step": step, "text": truncate(text)}  # type: ignore[typeddict-item]

    def _is_over(self, trouble: Trouble) -> bool:
        """Return True if the problem is over, because later steps or checkpoints are normal."""
        if trouble["kind"] == "checkpoint failed":
            return self._last_saved > trouble["step"]
        return trouble["kind"] != "replicas apart" and self._last_normal - trouble["step"] >= MIN_STEPS

    def get_troubles(self) -> list[Trouble]:
        return list(self._trouble.values())[:MAX_TROUBLES]

    def make_findings(self) -> Iterator[Finding]:
        for trouble in self._trouble.values():
            if trouble["kind"] != "spike" and not self._is_over(trouble):
                yield _make_finding(trouble)


def format_not_finite(text: str) -> str:
    """Return "the gradient norm is NaN" for "gradient norm is nan"."""
    values = re.sub(r"\bis (nan|-?inf)\b", lambda found: f"is {VALUES[found[1]]}", text)
    return " and ".join(f"the {part}" for part in values.split(" and "))


def _make_finding(trouble: Trouble) -> Finding:
    text, step = trouble["text"], trouble["step"]
    facts = (make_evidence(text, (), (step,) if step else ()),)
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
    reason = make_sentence(text.partition(": ")[2])
    sentence = f"Failed: the checkpoint after step {step} could not be written."
    following = "Free disk space on the host, or check its disk."
    return Finding("notice", 1.0, sentence, reason, following, facts, "open_log")
