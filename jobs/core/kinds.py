"""Describe each kind of job on the web: title, form, and the tabs and panels of its page.

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
SCRIPT_PANELS = (
    *("first/health", "first/waiting", "first/places", "first/steps", "first/parts", "first/start", "first/traffic"),
    *(
        "script-metrics",
        "script-curves",
        "timeline",
        "heat-pairs",
        "heat-time",
        "gauges",
        "log",
        "fidelity",
        "planned",
        "collectives",
    ),
)
MAX_SUBJECT = 120  # characters


class JobKindView(NamedTuple):
    """A kind of job on the web."""

    title: str
    subject: Callable[[Spec], str]  # describes the model, script or host of a spec
    form: str | None  # URL name of the form that copies a job, None if no form submits the kind
    tabs: Tabs
    steps: Literal["asked", "seen", "none"] = "none"  # "asked" in the spec, or only "seen" while the job runs
    result: Literal["profile", "lab"] | None = None  # result in the exit report of a successful job
    cancel_effect: str = "Results measured so far are lost."  # consequence of a cancel

    @property
    def panels(self) -> tuple[str, ...]:
        """List the panels of all tabs."""
        return tuple(name for names in self.tabs.values() for name in names)

    def get_requested_steps(self, spec: Spec) -> int | None:
        """Return the number of steps in the spec, or None if the kind has no steps."""
        return int(spec["train"]["steps"]) if self.steps == "asked" else None


def format_model(spec: Spec) -> str:
    """Return the preset name, or the size of a custom model."""
    model = spec["model"]
    if model["preset"]:
        return str(model["preset"])
    return f"{model['arch']}, {format_count(model['num_layers'], 'layer')} of {model['hidden_size']}"


def format_command(script: Spec) -> str:
    """Return the command line of a script."""
    if script.get("command"):
        return str(script["command"])
    program = ["-m", script["module"]] if script.get("module") else [script["path"]]
    return shlex.join([*program, *script["args"]])


def _describe_script(spec: Spec) -> str:
    words = format_command(spec["script"])
    return words if len(words) <= MAX_SUBJECT else words[: MAX_SUBJECT - 1] + "…"


def _describe_benchmark(spec: Spec) -> str:
    lab = LabSpec.model_validate(spec.get("lab") or {})
    return "1 collective" if len(lab.primitives) == 1 else f"{len(lab.primitives)} collectives"


def format_layout(spec: Spec) -> str:
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


KINDS: dict[JobKind, JobKindView] = {
    "train": JobKindView(
        title="training run",
        subject=format_model,
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
        cancel_effect="Steps after the last checkpoint are lost. Measurements are kept.",
    ),
    "script": JobKindView(
        title="script",
        subject=_describe_script,
        form="script-new",
        tabs={
            "overview": (
                "first/health",
                "first/waiting",
                "first/script",
                "first/steps",
                "first/traffic",
                "script-prediction",
            ),
            "training": ("script-metrics", "script-curves"),
            "traffic": ("heat-pairs", "heat-time", "collectives"),
            "time": ("first/parts", "first/start", "timeline"),
            "memory": ("gauges",),
            "logs": ("log",),
            "hosts": ("first/places", "hosts"),
        },
        steps="seen",
        cancel_effect="The work of the script is lost. Measured traffic is kept.",
    ),
    "dry_run": JobKindView(
        title="dry run",
        subject=format_model,
        form="job-new",
        tabs={
            "overview": ("first/waiting", "dry_run"),
            "verification": ("verdict",),
            "logs": ("log",),
            "hosts": ("hosts",),
        },
        cancel_effect="Results of finished ranks are kept.",
    ),
    "lab": JobKindView(
        title="benchmark",
        subject=_describe_benchmark,
        form="collectives",
        tabs={"overview": ("first/waiting", "lab"), "logs": ("log",), "hosts": ("hosts",)},
        result="lab",
    ),
    "calibrate": JobKindView(
        title="calibration",
        subject=lambda spec: str(spec["resources"]["host"]),
        form=None,
        tabs={"overview": ("first/waiting", "calibrate", "log"), "hosts": ("hosts",)},
        result="profile",
    ),
}


def get_external_tabs(kind: JobKindView) -> Tabs:
    """Return the tabs of an external run, which has only the panels that any script can fill."""
    tabs = {tab: tuple(name for name in names if name in SCRIPT_PANELS) for tab, names in kind.tabs.items()}
    overview = tuple(name for name in tabs["overview"] if name != "first/steps")
    tabs |= {"overview": ("first/elsewhere", "first/steps", *overview), "verification": ("proof",)}
    tabs |= {"training": ("script-metrics", "script-curves")}
    return {tab: tabs[tab] for tab in TABS if tabs.get(tab)}


def get_kind(spec: Spec) -> JobKindView:
    """Return the kind of a stored spec. The oldest specs do not name their kind."""
    return KINDS[spec.get("kind", asked.DEFAULT_KIND)]
