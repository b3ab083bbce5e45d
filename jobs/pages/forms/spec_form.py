"""The job form: its fields, and the texts of its choices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.utils.datastructures import MultiValueDict

from jobs.pages.forms import derived, field_groups
from jobs.pages.forms.field_groups import SCHEDULING_FIELDS, SOFTWARE_FIELDS
from jobs.planning.fit import ALLOW_UNFIT
from planner.facts.kinds import KINDS
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.presets import PRESETS, expand_preset
from planner.facts.resources import Resources, SlurmSpec
from planner.facts.spec import JobSpec, Layout, ModelSpec, TrainSpec
from planner.facts.validation import Problem, SpecError
from planner.hardware.stacks import STACKS
from planner.search.auto_layout import AutoSpec
from planner.search.neighbors import CHUNKS, DEGREES, find_impossible_options

DEFAULT_PRESET = "gpt-tiny"
_DRY = derived.read_fields("", JobSpec, only=["dry_ranks"])
_RANKS = derived.read_fields("layout.auto", AutoSpec, only=["ranks"])
_AUTO = _RANKS | {f"layout.auto.{name}": derived.HIDDEN_JSON for name in AutoSpec.model_fields if name != "ranks"}
MODEL_SECTIONS = {f"model.{name}": derived.HIDDEN_JSON for name in ("moe", "mla", "rope_scaling", "block")}
# Hidden inputs of the form. The Planner sets the software stack, which changes estimates only.
HIDDEN = (*MODEL_SECTIONS, "resources.stack", *SOFTWARE_FIELDS)
_MODEL = derived.read_fields("model", ModelSpec)
FIELDS = (
    derived.read_fields("", JobSpec, only=["name"])
    | _MODEL
    | derived.read_fields("layout", Layout)
    | derived.read_fields("train", TrainSpec)
    | derived.read_fields("resources", Resources)
    | derived.read_fields("resources.slurm", SlurmSpec)
    | SOFTWARE_FIELDS
    | SCHEDULING_FIELDS
)
NUMBER_FIELDS = FIELDS | _DRY | _RANKS  # fields whose limits and defaults the page shows
_SIZES = {name.removeprefix("model.") for name in _MODEL} - {"preset"}
_DEGREES = {str(degree): str(degree) for degree in DEGREES}
_LABELS: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("layout.dp", "layout.pp", "layout.tp", "layout.cp", "layout.ep"), _DEGREES),
    "layout.zero": {"0": "0 · DDP", "1": "1", "2": "2", "3": "3"},
    "layout.schedule": dict(SCHEDULE_NAMES),
    "layout.balance": {"layers": "equal layers", "cost": "equal cost"},
    "resources.stack": {name: stack.title for name, stack in STACKS.items()},
    "layout.cp_method": {"all_gather": "all-gather"},
    "model.arch": {"gpt": "GPT", "llama": "Llama"},
    "train.on_not_finite": {"stop": "stop the run", "continue": "continue"},
    "train.verify": {"auto": "automatic", "on": "on", "off": "off"},
    "train.sampling": {"random": "random", "epochs": "once per epoch"},
    "train.overlap": {"true": "overlapped", "false": "after backward"},
    "resources.device": {"cpu": "CPU", "cuda": "GPU"},
    **field_groups.LABELS,
}
# The fields of each fold of the form. A fold that changes the estimate starts open if it differs from the defaults.
_FOLDS: dict[str, tuple[str, ...]] = {
    "parallelism": ("layout.cp", "layout.cp_method", "layout.ep", "layout.dp_replicas", "layout.balance"),
    "performance": (
        *("layout.recompute", "train.overlap", "train.attention", "train.compile", "layout.regather"),
        *("layout.keep_gathered", "layout.scatter_gather"),
    ),
    "training": (
        *("train.learning_rate", "train.warmup_steps", "train.weight_decay", "train.grad_clip", "train.eval_every"),
        *("train.seed", "train.dropout", "train.on_not_finite", "train.verify"),
    ),
    "data": (
        *("train.data", "train.column", "train.tokenizer", "train.sampling", "train.document_end"),
        *("train.checkpoint_every", "train.keep_checkpoints", "train.resume"),
    ),
    "placement": (
        *("resources.host", "resources.engine", *SCHEDULING_FIELDS),
        *(name for name in FIELDS if name.startswith("resources.slurm.")),
    ),
    "dry": ("dry_ranks",),
}
_STARTS_OPEN = ("parallelism", "performance")


class Folds(NamedTuple):
    """The folds of the form that differ from the defaults, and those that are open."""

    changed: list[str]
    open: list[str]


def parse_form(form: MultiValueDict[str, str]) -> dict[str, Any]:
    """Return the untrusted spec of a form. A preset wins over the sizes that the form also sends."""
    spec = derived.parse_form(FIELDS | MODEL_SECTIONS, form)
    spec = field_groups.drop_unused_software(field_groups.drop_unused_engines(spec))
    preset = form.get("model.preset")
    if preset:
        spec["model"] = {"preset": preset}
    if form.get("auto") in derived.YES:
        auto = derived.parse_form(_AUTO, form).get("layout", {}).get("auto", {})
        spec["layout"] = {"auto": {name: value for name, value in auto.items() if value is not None}}
    if form.get(ALLOW_UNFIT) in derived.YES:
        spec[ALLOW_UNFIT] = True
    kind = form.get("kind")
    if any(name == kind and other.shares_one_slot for name, other in KINDS.items()):
        spec |= {"kind": kind, **derived.parse_form(_DRY, form)}
    return spec


def format_values(spec: object) -> dict[str, Any]:
    """Return the values of the form for a spec, which may be invalid. Missing values get their defaults."""
    whole = dict(spec) if isinstance(spec, Mapping) else {}
    model = whole.get("model")
    model = dict(model) if model and isinstance(model, Mapping) else {"preset": DEFAULT_PRESET}
    whole["model"] = {**expand_preset({"preset": DEFAULT_PRESET}), "preset": None, **expand_preset(model)}
    layout = whole.get("layout")
    is_auto = layout == "auto" or (isinstance(layout, Mapping) and "auto" in layout)
    return {
        **derived.format_values(FIELDS | MODEL_SECTIONS | _DRY | _AUTO, whole),
        "auto": "true" if is_auto else "false",
    }


def list_constraints(values: Mapping[str, str]) -> dict[str, str]:
    """Return the constraints on an automatic layout that the form has no fields for."""
    return {name.removeprefix("layout.auto."): values[name] for name in _AUTO if name not in _RANKS and values[name]}


def list_options(values: Mapping[str, str]) -> derived.Options:
    """Return the choices of each field that has some."""
    return derived.list_options(FIELDS, _LABELS, values)


def list_unavailable(spec: object) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, list[str]]]]]:
    """Return the unavailable options of each field, and the reasons with their options.

    Both are empty for a spec that cannot be read, because the page asks for them again.
    """
    try:
        found = find_impossible_options(parse_fields(spec))
    except SpecError:
        return {}, {}
    options: dict[str, list[str]] = {}
    reasons: dict[str, list[tuple[str, list[str]]]] = {}
    for field, by_option in found.items():
        grouped: dict[str, list[str]] = {}
        for option, reason in by_option.items():
            grouped.setdefault(reason, []).append(option)
        options[f"layout.{field}"] = [*by_option]
        reasons[f"layout.{field}"] = [*grouped.items()]
    return options, reasons


def format_query(spec: dict[str, Any], cluster: str) -> str:
    """Return the query string that opens the form with a spec. Values equal to the defaults are left out."""
    changed = _drop_defaults(
        {name: value for name, value in spec.items() if name != ALLOW_UNFIT}, "", format_values(None)
    )
    query = {"spec": json.dumps(changed, separators=(",", ":")), **({"cluster": cluster} if cluster else {})}
    return urlencode(query)


def _drop_defaults(section: Mapping[str, Any], prefix: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in section.items():
        path = f"{prefix}{name}"
        if path == "model":
            if value != {"preset": DEFAULT_PRESET}:
                changed[name] = value  # Sizes without their preset make sense only together.
        elif path == "layout" and "auto" in value:
            changed[name] = value
        elif isinstance(value, Mapping):
            if inner := _drop_defaults(value, f"{path}.", defaults):
                changed[name] = inner
        elif path not in FIELDS or FIELDS[path].write(value) != defaults[path]:
            changed[name] = value
    return changed


def find_folds(values: Mapping[str, str], errors: Mapping[str, str], starter: Mapping[str, Any]) -> Folds:
    """Return the folds that have changes and those that are open. The values of the `starter` spec are no changes."""
    defaults, first = format_values(None), format_values(starter)
    differs = {name for name in defaults if values.get(name) not in (defaults[name], first[name])}
    changed = [fold for fold, names in _FOLDS.items() if differs.intersection(names)]
    wrong = [fold for fold, names in _FOLDS.items() if any(errors.get(name) for name in names)]
    return Folds(changed, [fold for fold in _FOLDS if fold in wrong or (fold in _STARTS_OPEN and fold in changed)])


def sort_problems(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Return messages for the fields of the form, and lines for the other problems."""
    return derived.sort_problems(problems, [*NUMBER_FIELDS, "model", "layout", "layout.auto"], {})


def list_schedules() -> dict[str, dict[str, Any]]:
    """Return the label of each pipeline schedule and the chunks per stage that it starts with. The default is first."""
    names = sorted(SCHEDULE_NAMES, key=lambda name: name != Layout().schedule)
    return {name: {"label": SCHEDULE_NAMES[name], "chunks": CHUNKS.get(name, 1)} for name in names}


def format_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields of a model, without `model.` in their names."""
    names = {name: model[name] for name in _SIZES if name in model}
    parts = derived.format_values(MODEL_SECTIONS, {"model": model})
    return {**names, **{name.removeprefix("model."): text for name, text in parts.items()}}


def list_presets() -> dict[str, dict[str, Any]]:
    """Return the description, parameter count and sizes of each preset."""
    return {
        name: {
            "description": preset.description,
            "parameters": count_parameters(preset.model),
            "sizes": format_model(preset.model.model_dump()),
        }
        for name, preset in PRESETS.items()
    }
