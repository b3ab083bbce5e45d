"""The kinds of job, as far as the web shows them: words, the form a copy starts from, panels of the page, steps.

One of three tables: `planner.facts.kinds` has what each asks of a spec, `workers.host.start.programs` what a
host starts for it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from planner.facts import kinds as asked
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.spec import JobKind, LabSpec
from planner.facts.words import counted

Spec = Mapping[str, Any]
# Panels that no word of our trainer fills.
OF_ANY_SCRIPT = (
    *("health", "places", "start", "traffic", "timeline", "heat-pairs", "heat-time", "gauges", "log"),
    *("fidelity", "planned", "collectives"),
)
LONGEST_SUBJECT = 120  # characters; a script may take megabytes of arguments


class Kind(NamedTuple):
    """How the web shows a kind of job.

    `subject` says what a spec of it runs. `form` is the URL of the form that a copy starts from, none for what no form
    submits. `first` are the templates jobs/panels/first/NAME.html of its page's first screen, `panels` those below,
    jobs/panels/NAME.html, both in order. `steps`: whether so many were `asked` for, are only `seen` as they come, or it
    has none. `brings`: what its exit report's summary must hold for a good end to be one. `lost`: what a cancel costs.
    """

    title: str
    subject: Callable[[Spec], str]
    form: str | None
    panels: tuple[str, ...]
    first: tuple[str, ...] = ()
    steps: Literal["asked", "seen", "none"] = "none"
    brings: Literal["profile", "lab"] | None = None
    lost: str = "What it measured so far is lost."

    def steps_asked(self, spec: Spec) -> int | None:
        """Steps that the spec asks for, None where it asks for none."""
        return int(spec["train"]["steps"]) if self.steps == "asked" else None


def model_words(spec: Spec) -> str:
    """The preset's name, or the sizes of a custom model."""
    model = spec["model"]
    if model["preset"]:
        return str(model["preset"])
    return f"{model['arch']}, {counted(model['num_layers'], 'layer')} of {model['hidden_size']}"


def command_words(script: Spec) -> str:
    """A script and its arguments, as one would type them."""
    program = ["-m", script["module"]] if script.get("module") else [script["path"]]
    return shlex.join([*program, *script["args"]])


def _script_words(spec: Spec) -> str:
    words = command_words(spec["script"])
    return words if len(words) <= LONGEST_SUBJECT else words[: LONGEST_SUBJECT - 1] + "…"


def _lab_words(spec: Spec) -> str:
    lab = LabSpec.model_validate(spec.get("lab") or {})
    return "1 primitive" if len(lab.primitives) == 1 else f"{len(lab.primitives)} primitives"


def layout_words(spec: Spec) -> str:
    """'pp2 x dp2 x tp2 · zero-1 · sp · 1F1B'; '2 ranks' where the kind has no axis to name, or none is used."""
    layout = spec["layout"]
    if asked.kind_of(spec).plain:
        return counted(layout["dp"], "rank")
    axes = [f"{axis}{layout[axis]}" for axis in ("pp", "dp", "cp", "ep", "tp") if layout.get(axis, 1) > 1]
    words = [" x ".join(axes) or "1 rank"]
    if layout["zero"]:
        words.append(f"zero-{layout['zero']}")
    if layout["sequence_parallel"]:
        words.append("sp")
    if layout["pp"] > 1:
        words.append(SCHEDULE_NAMES[layout["schedule"]])
    return " · ".join(words)


KINDS: dict[JobKind, Kind] = {
    "train": Kind(
        title="training run",
        subject=model_words,
        form="job-new",
        first=("progress", "health", "places", "parts", "start", "traffic", "loss"),
        panels=(
            "smaller",
            "training",
            "gauges",
            "timeline",
            "heat-pairs",
            "heat-time",
            "log",
            "fidelity",
            "planned",
            "collectives",
            "proof",
            "checkpoints",
            "advice",
            "verdict",
        ),
        steps="asked",
        lost="What it has trained is lost; what it measured stays.",
    ),
    "script": Kind(
        title="script",
        subject=_script_words,
        form="script-new",
        first=("script", "health", "places", "start", "traffic"),
        panels=("gauges", "timeline", "heat-pairs", "heat-time", "log", "collectives"),
        steps="seen",
        lost="What it has done is lost; what it sent stays counted.",
    ),
    "dry_run": Kind(
        title="dry run",
        subject=model_words,
        form="job-new",
        panels=("dry_run", "verdict", "log"),
        lost="What was tried so far stays.",
    ),
    "lab": Kind(
        title="collective lab",
        subject=_lab_words,
        form="lab",
        panels=("lab", "log"),
        brings="lab",
    ),
    "calibrate": Kind(
        title="calibration",
        subject=lambda spec: str(spec["resources"]["host"]),
        form=None,
        panels=("calibrate", "log"),
        brings="profile",
    ),
}


def elsewhere_panels(kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a run that somebody else launched, first screen and below: its command, and what its ranks can fill."""
    first = ("elsewhere", *(name for name in kind.first if name in OF_ANY_SCRIPT))
    return first, (*(name for name in kind.panels if name in OF_ANY_SCRIPT), "proof")


def kind_of(spec: Spec) -> Kind:
    """The kind of a stored spec; the oldest do not name theirs."""
    return KINDS[spec.get("kind", asked.DEFAULT)]
