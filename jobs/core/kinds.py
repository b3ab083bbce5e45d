"""Show each kind of job: its words, its form, and the tabs and panels of its page.

`planner.facts.kinds` lists the spec fields of each kind. `workers.host.programs` lists the program of each kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from planner.facts import kinds as asked
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.spec import JobKind, LabSpec
from planner.facts.validation import format_count

Spec = Mapping[str, Any]
Tabs = Mapping[str, tuple[str, ...]]  # templates in templates/jobs/panels, by tab
TABS = {
    "overview": "Overview",
    "training": "Training",
    "traffic": "Traffic",
    "time": "Time",
    "memory": "Memory",
    "verification": "Verification",
    "logs": "Logs",
    "hosts": "Hosts",
}
# Panels that need nothing from Meshboard's trainer.
FOR_ANY_SCRIPT = (
    *("first/health", "first/waiting", "first/places", "first/start", "first/traffic"),
    *("timeline", "heat-pairs", "heat-time", "gauges", "log", "fidelity", "planned", "collectives"),
)
MAX_SUBJECT = 120  # characters


class Kind(NamedTuple):
    """A kind of job on the web."""

    title: str
    subject: Callable[[Spec], str]  # describes the model, script or host of a spec
    form: str | None  # URL name of the form that copies a job, None if no form submits the kind
    tabs: Tabs
    steps: Literal["asked", "seen", "none"] = "none"  # "asked" in the spec, or only "seen" while the job runs
    brings: Literal["profile", "lab"] | None = None  # result in the exit report of a successful job
    lost: str = "Results measured so far are lost."  # consequence of a cancel

    @property
    def panels(self) -> tuple[str, ...]:
        """List the panels of all tabs."""
        return tuple(name for names in self.tabs.values() for name in names)

    def steps_asked(self, spec: Spec) -> int | None:
        """Return the number of steps in the spec, or None if the kind has no steps."""
        return int(spec["train"]["steps"]) if self.steps == "asked" else None


def model_words(spec: Spec) -> str:
    """Return the preset name, or the size of a custom model."""
    model = spec["model"]
    if model["preset"]:
        return str(model["preset"])
    return f"{model['arch']}, {format_count(model['num_layers'], 'layer')} of {model['hidden_size']}"


def command_words(script: Spec) -> str:
    """Return the command line of a script."""
    program = ["-m", script["module"]] if script.get("module") else [script["path"]]
    return shlex.join([*program, *script["args"]])


def _script_words(spec: Spec) -> str:
    words = command_words(spec["script"])
    return words if len(words) <= MAX_SUBJECT else words[: MAX_SUBJECT - 1] + "…"


def _lab_words(spec: Spec) -> str:
    lab = LabSpec.model_validate(spec.get("lab") or {})
    return "1 collective" if len(lab.primitives) == 1 else f"{len(lab.primitives)} collectives"


def layout_words(spec: Spec) -> str:
    """Describe a layout, for example 'pp 2 x dp 2 x tp 2 · ZeRO-1 · sp · 1F1B' or '2 ranks'."""
    layout = spec["layout"]
    if asked.get_kind_rules(spec).dp_only:
        return format_count(layout["dp"], "rank")
    axes = [f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "ep", "tp") if layout.get(axis, 1) > 1]
    words = [" x ".join(axes) or "1 rank"]
    if layout["zero"]:
        words.append(f"ZeRO-{layout['zero']}")
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
        tabs={
            "overview": ("first/health", "first/waiting", "first/progress", "first/traffic", "first/loss", "smaller"),
            "training": ("training", "checkpoints"),
            "traffic": ("fidelity", "heat-pairs", "heat-time", "collectives"),
            "time": ("first/parts", "first/start", "timeline", "advice", "chosen"),
            "memory": ("planned", "gauges"),
            "verification": ("proof", "verdict"),
            "logs": ("log",),
            "hosts": ("first/places", "hosts"),
        },
        steps="asked",
        lost="Steps after the last checkpoint are lost. Measurements are kept.",
    ),
    "script": Kind(
        title="script",
        subject=_script_words,
        form="script-new",
        tabs={
            "overview": ("first/health", "first/waiting", "first/script", "first/traffic"),
            "traffic": ("heat-pairs", "heat-time", "collectives"),
            "time": ("first/start", "timeline"),
            "memory": ("gauges",),
            "logs": ("log",),
            "hosts": ("first/places", "hosts"),
        },
        steps="seen",
        lost="The work of the script is lost. Measured traffic is kept.",
    ),
    "dry_run": Kind(
        title="dry run",
        subject=model_words,
        form="job-new",
        tabs={
            "overview": ("first/waiting", "dry_run"),
            "verification": ("verdict",),
            "logs": ("log",),
            "hosts": ("hosts",),
        },
        lost="Results of finished ranks are kept.",
    ),
    "lab": Kind(
        title="benchmark",
        subject=_lab_words,
        form="collectives",
        tabs={"overview": ("first/waiting", "lab"), "logs": ("log",), "hosts": ("hosts",)},
        brings="lab",
    ),
    "calibrate": Kind(
        title="calibration",
        subject=lambda spec: str(spec["resources"]["host"]),
        form=None,
        tabs={"overview": ("first/waiting", "calibrate", "log"), "hosts": ("hosts",)},
        brings="profile",
    ),
}


def external_tabs(kind: Kind) -> Tabs:
    """Return the tabs of an external run, which has only the panels that any script can fill."""
    tabs = {tab: tuple(name for name in names if name in FOR_ANY_SCRIPT) for tab, names in kind.tabs.items()}
    tabs |= {"overview": ("first/elsewhere", *tabs["overview"]), "verification": ("proof",)}
    return {tab: tabs[tab] for tab in TABS if tabs.get(tab)}


def kind_of(spec: Spec) -> Kind:
    """Return the kind of a stored spec. The oldest specs do not name their kind."""
    return KINDS[spec.get("kind", asked.DEFAULT_KIND)]
