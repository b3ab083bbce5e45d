"""Plans, searches, and explanations of a draft spec, for the job form, the Planner page, and REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.planning.admission import find_board_problems
from jobs.planning.auto_layout import resolve_auto_layout
from jobs.planning.checkpoints import find_checkpoint_problems
from jobs.planning.fit import split_allow_unfit
from jobs.planning.hosts import (
    HOST_PREFIX,
    AvailableHost,
    build_host_cluster,
    get_cluster,
    get_measured_hosts,
    list_hosts,
    predict_cluster,
)
from jobs.planning.planner_processes import run_task
from jobs.planning.planner_tasks import serialize_problems
from jobs.planning.schemas import (
    ExplainRequest,
    ImportedLayout,
    ImportedModel,
    ImportLayoutRequest,
    Plan,
    Preset,
    SearchRequest,
    SearchResult,
    Template,
    validate_request,
)
from planner.cost.estimate import Estimate, estimate
from planner.cost.measured_steps import MEASURED_STEPS, serialize_steps, split_measured_steps
from planner.explain import Explanation
from planner.facts.hugging_face import parse_config, read_config
from planner.facts.kinds import KINDS, reset_dry_ranks
from planner.facts.model_shapes import count_active_parameters, count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.precision import MIXED_PRECISIONS
from planner.facts.presets import PRESETS, TEMPLATES
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.tool_layouts.recognition import read_layout
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import AutoLayout


class DraftPlan(NamedTuple):
    """Plan of a draft with its inputs. `spec` and `cluster` are None if the draft cannot be parsed.

    Args:
        names_cluster: The request or the draft names the cluster.
    """

    plan: Plan
    spec: JobSpec | None = None
    hosts: Sequence[AvailableHost] = ()
    cluster: Cluster | None = None
    names_cluster: bool = False


def plan_draft(data: object, cluster_name: object = None, *, user: Any) -> DraftPlan:
    """Plan a draft of a user.

    The estimate is null while the draft has problems, or if its kind trains no model. `chosen` has the automatic
    layout and its reasons, or null if the draft names a layout.

    Raises:
        BusyError: The planner is busy, or the plan takes too long.
    """
    try:
        data, _ = split_allow_unfit(data)
        data, steps = split_measured_steps(data)
        data, chosen = resolve_auto_layout(data, cluster_name, to_run=False, measured_steps=steps)
        spec = parse_fields(data)
        hosts = list_hosts(spec)
        name = _get_cluster_name(cluster_name, chosen)
        cluster = get_cluster(name, spec) if name else predict_cluster(spec, hosts)
    except SpecError as error:
        problems = serialize_problems(error.problems)
        return DraftPlan({"estimate": None, "problems": problems, "not_runnable": [], "choices": {}})
    plan: Plan = run_task("plan", spec, cluster, {MEASURED_STEPS: serialize_steps(steps)})
    plan["problems"] += serialize_problems(find_board_problems(user, spec, hosts))
    plan["not_runnable"] = [*plan["not_runnable"], *serialize_problems(find_checkpoint_problems(user, spec))]
    plan["chosen"] = chosen
    return DraftPlan(plan, spec, hosts, cluster, bool(name))


def get_estimate_to_run(draft: DraftPlan) -> Mapping[str, Any] | None:
    """Return the estimate of a planned draft on the hardware that it would run on. Raises BusyError."""
    if draft.spec is None or draft.plan["estimate"] is None or not draft.names_cluster:
        return draft.plan["estimate"]
    cluster = predict_cluster(draft.spec, draft.hosts)
    if cluster == draft.cluster:
        return draft.plan["estimate"]
    found: Mapping[str, Any] = run_task("estimate", draft.spec, cluster, {})
    return found


def estimate_job(spec: JobSpec, cluster: Cluster) -> Estimate | dict[str, Any]:
    """Return the estimate to store with a job, or {} for a kind that trains no model."""
    return estimate(spec, cluster) if KINDS[spec.kind].trains else {}


def explain_draft(data: object) -> list[Explanation]:
    """Return the terms of each figure for a rank of a stage.

    Raises:
        SpecError: The draft cannot be planned, or has no such stage.
        BusyError
    """
    query = validate_request(ExplainRequest, data)
    steps = query.measured_steps
    data, chosen = resolve_auto_layout(query.spec, query.cluster, to_run=False, measured_steps=steps)
    spec = parse_fields(data)
    cluster = get_cluster(_get_cluster_name(query.cluster, chosen), spec)
    options = {"stage": query.stage, MEASURED_STEPS: serialize_steps(steps)}
    explanations: list[Explanation] = run_task("explain", spec, cluster, options)
    return explanations


def _get_cluster_name(cluster_name: object, chosen: AutoLayout | None) -> object:
    """Return the requested cluster, or the cluster that the layout was chosen for."""
    return cluster_name or (chosen and chosen["asked"].get("cluster"))


def search_layouts(data: object) -> SearchResult:
    """Search the layouts on a number of ranks.

    Raises:
        SpecError: A field is missing, unknown, or invalid.
        BusyError
    """
    query = validate_request(SearchRequest, data)
    # The search starts from a layout with only the fixed fields.
    seed = {**query.spec, "layout": dict(query.fixed)} if isinstance(query.spec, Mapping) else query.spec
    spec = reset_dry_ranks(parse_fields(seed))
    options = {
        "world_size": query.ranks,
        "fixed": query.fixed,
        "max_micro_batch": query.max_micro_batch,
        "max_memory_bytes": query.max_memory_bytes,
        "runnable": query.runnable,
        "limit": query.limit,
        MEASURED_STEPS: serialize_steps(query.measured_steps),
    }
    result: SearchResult = run_task("search", spec, get_cluster(query.cluster, spec), options)
    return result


def list_presets() -> list[Preset]:
    """Return the model presets with exact parameter counts."""
    return [
        {
            "name": name,
            "description": preset.description,
            "parameters": count_parameters(preset.model),
            "model": preset.model.model_dump(),
        }
        for name, preset in PRESETS.items()
    ]


def import_model(config: object) -> ImportedModel:
    """Return the model of a Hugging Face config.json, which is its text or the parsed object.

    Raises:
        SpecError: The planner cannot plan the model.
    """
    found = parse_config(config) if isinstance(config, bytes) else read_config(config)
    spec = JobSpec(model=found.model)
    unsupported = [problem for problem in find_unsupported_fields(spec) if problem.field.startswith("model.")]
    return {
        "model": found.model.model_dump(),
        "parameters": count_parameters(found.model),
        "active_parameters": count_active_parameters(found.model),
        "assumed": found.is_assumed,
        "notes": [*found.notes],
        "not_runnable": serialize_problems(unsupported),
    }


def import_layout(data: object) -> ImportedLayout:
    """Return the layout in the config file of another training tool.

    Raises:
        SpecError: The file is not a known config, or has a setting that cannot be planned.
    """
    query = validate_request(ImportLayoutRequest, data)
    found = read_layout(query.text, query.ranks)
    return {
        "tool": found.tool,
        "ranks": found.ranks,
        "spec": found.spec,
        "assumed": [*found.assumed],
        "notes": [*found.notes],
        "not_understood": [*found.not_understood],
    }


def list_clusters() -> list[dict[str, Any]]:
    """Return the named clusters and the measured hosts with their properties."""
    hosts = {f"{HOST_PREFIX}{host.name}": build_host_cluster(host) for host in get_measured_hosts()}
    clusters = {**CLUSTERS, **hosts}
    return [
        {"id": name, **cluster.model_dump(exclude={"profile", "runs", "measured_steps"})}
        for name, cluster in clusters.items()
    ]


def list_templates() -> list[Template]:
    """Return the published layouts, each with a small copy for a CPU."""
    return [
        {
            "id": name,
            "title": template.title,
            "source": template.source,
            "cluster": template.cluster,
            "spec": template.spec,
            "twin": template.twin,
        }
        for name, template in TEMPLATES.items()
    ]


def list_precisions() -> list[tuple[str, str]]:
    """Return the name and description of each precision."""
    return [(name, mix.description) for name, mix in MIXED_PRECISIONS.items()]
