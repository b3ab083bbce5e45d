"""The job form, and the form that runs your own training script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from contracts.archives import MAX_ARCHIVE_BYTES, list_scripts
from jobs.core.access import find_job, get_submittable_projects
from jobs.core.errors import NotFoundError
from jobs.core.received_files import MAX_PART_BYTES
from jobs.core.text import parse_json
from jobs.models import Job, Upload
from jobs.pages.forms import derived, field_groups, spec_form
from jobs.pages.view_helpers import get_user, submit_once
from jobs.planning.fit import UnfitError
from jobs.planning.hosts import OWN_FIELDS, list_hardware
from jobs.planning.planner_processes import BusyError
from jobs.planning.uploads import MAX_LISTED_SCRIPTS, list_paths
from planner.facts.hugging_face import parse_config
from planner.facts.presets import TEMPLATES
from planner.facts.resources import Resources, SlurmSpec
from planner.facts.spec import JobSpec, Layout, ScriptSpec, TrainSpec
from planner.facts.validation import Problem, SpecError
from planner.hardware.stacks import STACKS

FIRST_RUN = {
    "name": "my first run",
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 200, "eval_every": 50},
}
PREFILLED = ("train.steps",)  # the form starts with another value, so the page does not name the default
FIRST_SCRIPT: dict[str, Any] = {"name": "my script", "layout": {"dp": 2}}
SCRIPT_FIELDS = (
    derived.read_fields("", JobSpec, only=["name"])
    | derived.read_fields("script", ScriptSpec)
    | derived.read_fields("layout", Layout, only=["dp"])
    | derived.read_fields("resources", Resources, only=["device", "host", "engine"])
    | derived.read_fields("resources.slurm", SlurmSpec)
    | field_groups.SCHEDULING_FIELDS
)
PLAN_FIELDS = derived.read_fields(
    "script.plan.train", TrainSpec, only=["global_batch", "micro_batches", "seq_len", "precision"]
) | {"script.plan.model": derived.HIDDEN_JSON, "script.plan.layout": derived.HIDDEN_JSON}
SCRIPT_FIELDS |= PLAN_FIELDS
HOST_SCRIPT_FIELDS = ("script.path", "script.module", "script.command")  # without an upload, they start files of hosts
PLAN_MODEL = "plan_model"  # the choice of the model: a preset, COPIED_MODEL, or "" without a prediction
COPIED_MODEL = "copied"
PLAN_CONFIG = "plan_config"  # the text of a Hugging Face config.json, instead of the choice


@require_http_methods(["GET", "POST"])
def job_new(request: HttpRequest) -> HttpResponse:
    """Show the form, or submit it.

    `?from=ID` fills it in from a job, and `&resume=CHECKPOINT` resumes from one of its checkpoints. `?template=NAME`
    fills in a published layout, and `?spec=JSON` any spec. A POST has the fields of the form, or one field `spec` with
    the JSON of a whole spec.
    """
    if request.method == "GET":
        return _render_filled_form(request)
    if "spec" in request.POST:
        try:
            data = parse_json(request.POST["spec"])
        except ValueError:
            problem = Problem("spec", "The form arrived empty or incomplete. Submit it again.")
            return _render_form(request, FIRST_RUN, [problem])
    else:
        data = spec_form.parse_form(request.POST)
    cluster = request.POST.get("cluster", "")
    try:
        return submit_once(request, data)
    except UnfitError as error:
        return _render_form(request, data, error.problems, cluster=cluster, is_unfit=True)
    except SpecError as error:
        return _render_form(request, data, error.problems, cluster=cluster)
    except BusyError as error:
        return _render_form(request, data, [Problem("layout", str(error))], cluster=cluster)


def _render_filled_form(request: HttpRequest) -> HttpResponse:
    query = request.GET
    if "from" in query:
        source = find_job(request.user, query["from"])
        spec = source.spec
        if checkpoint := query.get("resume"):
            spec = {**spec, "train": {**spec.get("train", {}), "resume": checkpoint}}
        return _render_form(request, spec, [], source=source)
    if "template" in query:
        template = TEMPLATES.get(query["template"])
        if template is None:
            raise NotFoundError("template")
        twin = "twin" in query
        return _render_form(
            request, template.twin if twin else template.spec, [], cluster="" if twin else template.cluster
        )
    if "spec" in query:
        try:
            return _render_form(request, parse_json(query["spec"]), [], cluster=query.get("cluster", ""))
        except ValueError:
            message = "The `spec` in this link is not valid JSON. Fill in the form, or copy the whole link again."
            return _render_form(request, FIRST_RUN, [Problem("spec", message)])
    return _render_form(request, FIRST_RUN, [])


def _render_form(
    request: HttpRequest,
    spec: Any,
    problems: list[Problem],
    *,
    source: Job | None = None,
    cluster: str = "",
    is_unfit: bool = False,
) -> HttpResponse:
    values = spec_form.format_values(spec)
    errors, other_errors = spec_form.sort_problems(problems)
    stack = STACKS.get(values["resources.stack"])
    defaults = derived.format_defaults(spec_form.NUMBER_FIELDS)
    unavailable, reasons = spec_form.list_unavailable(spec)
    context = {
        "values": values,
        "options": spec_form.list_options(values),
        "parts": spec_form.HIDDEN,
        "constraints": spec_form.list_constraints(values),
        "limits": derived.format_limits(spec_form.NUMBER_FIELDS),
        "defaults": {name: text for name, text in defaults.items() if name not in PREFILLED},
        "unavailable": unavailable,
        "reasons": reasons,
        "errors": errors,
        "other_errors": other_errors,
        "presets": spec_form.list_presets(),
        "schedules": spec_form.list_schedules(),
        "source": source,
        "templates": TEMPLATES,
        "hardware": list_hardware(),
        "own_fields": OWN_FIELDS,
        "cluster": cluster,
        "other_stack": stack.title if stack and values["resources.stack"] != "ours" else "",
        "folds": spec_form.find_folds(values, errors, FIRST_RUN),
        "projects": get_submittable_projects(request.user),
        "slurm": settings.SLURM is not None,
        "is_unfit": is_unfit,
    }
    return render(request, "jobs/new.html", context, status=422 if problems else 200)


@require_http_methods(["GET", "POST"])
def script_new(request: HttpRequest) -> HttpResponse:
    """Show the form of your own script, or submit it. `?from=ID` fills it in from a job."""
    if request.method == "GET":
        spec = find_job(request.user, request.GET["from"]).spec if "from" in request.GET else FIRST_SCRIPT
        plan = (spec.get("script") or {}).get("plan")
        choice = (plan["model"]["preset"] or COPIED_MODEL) if plan else ""
        return _render_script_form(request, {**derived.format_values(SCRIPT_FIELDS, spec), PLAN_MODEL: choice}, [])
    try:
        spec = field_groups.drop_unused_engines(derived.parse_form(SCRIPT_FIELDS, request.POST))
        _set_planned_model(spec, request.POST)
        return submit_once(request, {"kind": "script", **spec})
    except SpecError as error:
        values = {name: request.POST.get(name, "") for name in (*SCRIPT_FIELDS, PLAN_MODEL, PLAN_CONFIG)}
        return _render_script_form(request, values, error.problems)


def _set_planned_model(spec: dict[str, Any], form: Mapping[str, str]) -> None:
    """Set the model of the prediction: a config.json, or the choice. Without both, the script has no prediction.

    Raises:
        SpecError: The config.json cannot be planned.
    """
    script = spec.get("script", {})
    plan, choice, config = script.pop("plan", {}), form.get(PLAN_MODEL, ""), form.get(PLAN_CONFIG, "").strip()
    if config:
        script["plan"] = {**plan, "model": parse_config(config).model.model_dump()}
    elif choice:
        model = plan.get("model") if choice == COPIED_MODEL else {"preset": choice}
        script["plan"] = {**plan, "model": model}


def _render_script_form(request: HttpRequest, values: dict[str, Any], problems: list[Problem]) -> HttpResponse:
    errors, other_errors = derived.sort_problems(
        problems,
        SCRIPT_FIELDS,
        {"layout": "layout.dp", "script": "script.path", "script.plan.model.preset": "script.plan.model"},
    )
    labels = {**field_groups.LABELS, "resources.device": {"cpu": "CPU", "cuda": "GPU"}}
    sha256 = values["script.upload"]
    upload = Upload.objects.filter(owner=get_user(request), sha256=sha256).first() if sha256 else None
    if sha256 and upload is None:
        errors.setdefault("script.upload", "This upload was deleted, or another user owns it. Upload the script.")
    context = {
        "presets": spec_form.list_presets(),
        "values": values,
        "upload": upload,
        "uploads_script": bool(sha256) or not any(values[name] for name in HOST_SCRIPT_FIELDS),
        "scripts": list_scripts(list_paths(upload), MAX_LISTED_SCRIPTS) if upload else [],
        "upload_limits": {
            "part_bytes": MAX_PART_BYTES,
            "archive_bytes": MAX_ARCHIVE_BYTES,
            "megabytes": MAX_ARCHIVE_BYTES // 10**6,
        },
        "errors": errors,
        "other_errors": other_errors,
        "options": derived.list_options(SCRIPT_FIELDS, labels, values),
        "limits": derived.format_limits(SCRIPT_FIELDS),
        "defaults": derived.format_defaults(SCRIPT_FIELDS),
        "projects": get_submittable_projects(request.user),
        "slurm": settings.SLURM is not None,
        "turn": field_groups.has_scheduling_changes(values),
    }
    return render(request, "jobs/script.html", context, status=422 if problems else 200)
