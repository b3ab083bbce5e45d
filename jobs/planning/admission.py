"""Problems of a job that depend on the board: hosts, projects, pools, and other jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings

from jobs.core.access import get_role, get_visible_jobs, may_change_hosts
from jobs.core.kinds import KINDS
from jobs.models import DEFAULT_PROJECT, LIVE, Job, Pool, Project, Role
from jobs.models.validators import check_name
from jobs.planning.hosts import AvailableHost, get_slot_device
from jobs.planning.uploads import find_upload_problems
from planner.facts.collectives import FULL_BUFFERS, compute_lab_sizes, count_full_buffers, get_lab_ranks
from planner.facts.kinds import SlotDemand, compute_slot_demand, format_world_size, get_num_slots
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count

MAX_NAMED_HOSTS = 5
GIB = 2**30


def find_board_problems(owner: Any, spec: JobSpec, hosts: Sequence[AvailableHost]) -> list[Problem]:
    """Return the reasons for which the board refuses a job, except problems of its checkpoint.

    Args:
        hosts: Hosts of the job, from `list_hosts`.
    """
    engine_problems = []
    if spec.resources.engine == "slurm" and settings.SLURM is None:
        message = "`resources.engine` is slurm, but `MESHBOARD_SLURM_FOLDER` is not set on this board. Use hosts."
        engine_problems.append(Problem("resources.engine", message))
    return [
        *find_capacity_problems(spec, hosts),
        *find_host_problems(spec, hosts),
        *find_lab_memory_problems(spec, hosts),
        *engine_problems,
        *check_name("name", spec.name),
        *_find_project_problems(owner, spec),
        *_find_pool_problems(spec),
        *_find_dependency_problems(owner, spec),
        *find_upload_problems(owner, spec),
        *find_calibration_problems(owner, spec, hosts),
    ]


def find_capacity_problems(spec: JobSpec, hosts: Sequence[AvailableHost], *, now: bool = False) -> list[Problem]:
    """Return why the hosts cannot hold a job, even without other jobs.

    A board without live hosts of the device has no problem, because a host can join.

    Args:
        now: Count only hosts that accept jobs now. A job can wait for a drained host.
    """
    device, demand = get_slot_device(spec, hosts), compute_slot_demand(spec)
    models: dict[str, list[int]] = {}
    for host in hosts:
        if host.device == device and (host.accepts_jobs if now else host.is_live):
            models.setdefault(host.device_name, []).append(host.slots)
    if not models or any(demand.get_best_unit(sizes) is not None for sizes in models.values()):
        return []
    available = _describe_capacity(demand, device, models)
    return [Problem("layout", f"{format_world_size(spec.layout)}, but {available}. Use fewer ranks.")]


def _describe_capacity(demand: SlotDemand, device: str, models: dict[str, list[int]]) -> str:
    largest = max(max(sizes) for sizes in models.values())
    unit = min(demand.units)
    largest_host = f"the largest {device.upper()} host has {format_count(largest, 'slot')}"
    if demand.max_hosts == 1 or all(len(sizes) == 1 for sizes in models.values()):
        return largest_host
    if unit > largest:
        return f"a tensor-parallel group of {unit} ranks needs to be on one host, and {largest_host}"
    slots = format_count(max(demand.get_max_slots(sizes, unit) for sizes in models.values()), "slot")
    gang = f"at most {format_count(demand.max_hosts, f'{device} host')}" if demand.max_hosts else f"{device} hosts"
    multiples = f" in multiples of {unit}" if unit > 1 else ""
    return f"{gang} of the same hardware model have {slots} in total{multiples}"


def find_host_problems(spec: JobSpec, hosts: Sequence[AvailableHost]) -> list[Problem]:
    """Return why a job would wait forever for the host that it names.

    A board without hosts of the device has no problem, except for a calibration.
    """
    wanted, device = spec.resources.host, get_slot_device(spec, hosts)
    if wanted is None or spec.resources.engine != "hosts":
        return []
    names = [host.name for host in hosts if host.device == device]
    if wanted in names:
        return []
    if other := next((host.device for host in hosts if host.name == wanted), None):
        message = f"which has only {other} slots, but the job needs {device} slots."
        return [Problem("resources.host", f"`resources.host` is {wanted}, {message}")]
    if not names and KINDS[spec.kind].result != "profile":
        return []
    choices = ""
    if names:
        more = f" and {len(names) - MAX_NAMED_HOSTS} more" if len(names) > MAX_NAMED_HOSTS else ""
        choices = f" Use {' or '.join(names) if len(names) <= 2 else ', '.join(names[:MAX_NAMED_HOSTS])}{more}."
    return [Problem("resources.host", f"`resources.host` is {wanted!r}, but no such {device} host exists.{choices}")]


def find_lab_memory_problems(spec: JobSpec, hosts: Sequence[AvailableHost]) -> list[Problem]:
    """Return why no host has the memory for the buffers of a benchmark of collectives.

    Ranks on a CPU share the memory of their host. Ranks on GPUs have a GPU each.
    """
    if spec.lab is None:  # another kind, or the default sizes, which are small
        return []
    num_ranks, has_gpus = len(get_lab_ranks(spec)), spec.resources.device == "cuda"
    size = max(compute_lab_sizes(spec.lab, num_ranks), default=0)
    copies = {name: 1 if has_gpus else count_full_buffers(name, num_ranks) for name in spec.lab.primitives}
    largest = max(copies, key=lambda name: copies[name] * FULL_BUFFERS[name])
    needed_bytes = copies[largest] * FULL_BUFFERS[largest] * size
    suitable = [
        host
        for host in hosts
        if host.device == spec.resources.device
        and host.slots >= spec.layout.world_size
        and spec.resources.host in (None, host.name)
    ]
    if not suitable or not all(host.memory_bytes for host in suitable):  # a host without known memory can suffice
        return []
    memory_bytes, host_name = max(
        ((host.memory_bytes * (1 if has_gpus else host.slots), host.name) for host in suitable), key=lambda one: one[0]
    )
    if needed_bytes <= memory_bytes:
        return []
    ranks = "" if has_gpus else f"{format_count(copies[largest], 'rank')} x "
    buffers = f"{ranks}{format_count(FULL_BUFFERS[largest], 'full buffer')} of {largest} x {size:,} B"
    place = f"a GPU of {host_name}" if has_gpus else host_name
    needs = f"The benchmark needs {needed_bytes / GIB:,.1f} GiB ({buffers})"
    message = f"{needs}, but {place} has {memory_bytes / GIB:,.1f} GiB. Use a smaller `lab.max_bytes`."
    return [Problem("lab.max_bytes", message)]


def _find_project_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    project, role = Project.objects.filter(name=spec.project).first(), get_role(owner, spec.project)
    if role is None or (project is None and spec.project != DEFAULT_PROJECT):
        message = "but you are not a member of such a project. Use one of your projects."
        return [Problem("project", f"`project` is {spec.project!r}, {message}")]
    if role < Role.SUBMITTER:
        message = f"is {role.label}. Ask a project admin for the `submitter` role."
        return [Problem("project", f"Your role in `project` {spec.project!r} {message}")]
    if project is None:
        return []
    if spec.resources.engine == "slurm" and project.variables.exists():
        message = "has variables, and Slurm jobs cannot use them. Use another project or engine."
        return [Problem("resources.engine", f"Project {project.name} {message}")]
    if project.max_slots is not None and get_num_slots(spec) > project.max_slots:
        limit = f"project {project.name} is limited to {format_count(project.max_slots, 'slot')}"
        return [Problem("layout", f"{format_world_size(spec.layout)}, but {limit}. Use fewer ranks.")]
    return []


def _find_pool_problems(spec: JobSpec) -> list[Problem]:
    pool = spec.resources.pool
    if pool is None or Pool.objects.filter(name=pool).exists():
        return []
    message = "but this pool does not exist. Omit the field to use any host."
    return [Problem("resources.pool", f"`resources.pool` is {pool!r}, {message}")]


def _find_dependency_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    visible = get_visible_jobs(owner).filter(id__in=spec.after).values_list("id", flat=True) if spec.after else ()
    return [
        Problem("after", f"`after` names job {job!r}, but this job does not exist, or you cannot see it.")
        for job in sorted({*spec.after} - {*visible})
    ]


def find_calibration_problems(owner: Any, spec: JobSpec, hosts: Iterable[AvailableHost]) -> list[Problem]:
    """Return why a job cannot calibrate its host. A missing host is a problem of `find_host_problems`."""
    if KINDS[spec.kind].result != "profile":
        return []
    if not may_change_hosts(owner):
        message = "`kind` is calibrate, but only staff who can change hosts can start a calibration. Ask staff."
        return [Problem("kind", message)]
    key = spec.resources.host, spec.resources.device
    host = next((host for host in hosts if (host.name, host.device) == key), None)
    if host is None:
        return []
    problems = []
    if host.drained:
        message = f"`resources.host` is {host.name}, which is drained. Undrain the host first."
        problems.append(Problem("resources.host", message))
    if Job.objects.filter(kind=spec.kind, wanted_host=host.name, status__in=LIVE).exists():
        message = "is already queued or running. Wait until the calibration ends."
        problems.append(Problem("resources.host", f"A calibration of host {host.name} {message}"))
    if get_num_slots(spec) != host.slots:
        slots = f"a calibration of host {host.name} uses all {format_count(host.slots, 'slot')}"
        message = f"{format_world_size(spec.layout)}, but {slots}. Set `layout.dp` to {host.slots}."
        problems.append(Problem("layout", message))
    return problems
