"""Choice of the host whose hardware is used to plan a job."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from jobs.models import Host, Job, Pool
from jobs.planning.hosts import AvailableHost, build_cluster_like, build_host_cluster, list_hosts, predict_cluster
from jobs.queue.actions import submit
from planner.cost.estimate import get_default_cluster
from planner.cost.timing import get_step_timing
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from tests.planner.wrong_specs import GOOD

# Queries without hosts: token, hosts, project, savepoint and its release, job, state, notifications, audit entry.
# Hosts add three queries: hosts with measured runs, the planned host, and its runs.
NUM_QUERIES_WITHOUT_HOSTS, NUM_QUERIES_WITH_HOSTS = 9, 12


@pytest.mark.parametrize(("hosts", "max_queries"), [(0, NUM_QUERIES_WITHOUT_HOSTS), (40, NUM_QUERIES_WITH_HOSTS)])
def test_submit_uses_few_queries(
    hosts: int,
    max_queries: int,
    owner: User,
    api: Callable[[User], APIClient],
    make_host: Callable[..., Host],
    django_assert_max_num_queries: Any,
) -> None:
    for number in range(hosts):
        make_host(f"host-{number}", slots=8)
    Host.objects.filter(name="host-7").update(profile={"of": "an older version"})
    client = api(owner)
    with django_assert_max_num_queries(max_queries):
        response = client.post("/api/v1/jobs", GOOD, format="json")
    assert response.status_code == 201
    job = client.get(f"/api/v1/jobs/{response.json()['id']}").json()
    assert job == response.json(), "submit returns the stored job"
    assert Job.objects.get().hardware["name"] == ("host-7" if hosts else get_default_cluster(parse_spec(GOOD)).name)


def test_uses_the_data_sheet_if_the_host_disappears(db: None) -> None:
    spec = parse_spec(GOOD)
    gone = AvailableHost(
        7,
        "gone",
        8,
        "cpu",
        drained=False,
        is_live=True,
        is_measured=True,
        device="cpu",
        memory_bytes=1,
        labels=frozenset(),
    )
    assert predict_cluster(spec, [gone]) == get_default_cluster(spec)


def test_uncalibrated_cpu_uses_its_reported_cores(
    make_host: Callable[..., Host],
) -> None:
    """Shared cores and emulated bf16 make the predicted step longer."""
    spec = parse_spec({**GOOD, "layout": {"dp": 4}, "train": {**GOOD["train"], "precision": "bf16"}})
    host = make_host(slots=4)
    compute_s = [get_step_timing(spec, predict_cluster(spec, list_hosts(spec))).compute_s]
    for facts in ({"cores": 4, "bf16": "native"}, {"cores": 2, "bf16": "native"}, {"cores": 2, "bf16": "scalar"}):
        Host.objects.update(facts=facts)
        cluster = predict_cluster(spec, list_hosts(spec))
        assert (cluster.name, cluster.cores) == (host.name, facts["cores"])
        compute_s.append(get_step_timing(spec, cluster).compute_s)
    default, one_rank_per_core, crowded, scalar = compute_s
    assert default == one_rank_per_core
    assert crowded == pytest.approx(2 * one_rank_per_core)
    assert scalar > 4 * crowded


def test_slurm_jobs_have_no_known_hosts(make_host: Callable[..., Host]) -> None:
    make_host()
    spec = parse_spec(GOOD)
    assert len(list_hosts(spec)) == 1
    slurm = spec.model_copy(update={"resources": spec.resources.model_copy(update={"engine": "slurm"})})
    assert list_hosts(slurm) == []


@pytest.mark.parametrize(
    ("device_name", "gib", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA GB200", 185, "gb200"),
        ("NVIDIA B200", 178, "b200"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("AMD Instinct MI325X", 256, "mi325x"),
        ("NVIDIA A800-SXM4-80GB", 79, "a800"),
        ("NVIDIA H800", 79, "h800"),
        ("NVIDIA H20", 95, "h20"),
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA RTX A6000", 47, "rtx-a6000"),
        ("NVIDIA GeForce RTX 3090", 23, "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", 23, "rtx-4090"),
    ],
)
def test_host_uses_the_data_sheet_of_its_gpu(
    device_name: str, gib: int, sheet: str, make_host: Callable[..., Host]
) -> None:
    """A GPU without measurements has the rates of its own data sheet, not of the default GPU."""
    host = make_host()
    host.device, host.device_name, host.memory_bytes = "cuda", device_name, gib * 2**30
    cluster = build_host_cluster(host)
    own = {"name": device_name, "memory_bytes": gib * 2**30}
    assert cluster.accelerator == CLUSTERS[sheet].accelerator.model_copy(update=own)
    assert cluster.node == CLUSTERS[sheet].node
    assert build_cluster_like(host, 4).network == CLUSTERS[sheet].network


def test_plans_a_job_for_connected_gpus(make_host: Callable[..., Host]) -> None:
    """A connected GPU is used even if no job has run on it."""
    host = make_host()
    Host.objects.update(device="cuda", device_name="NVIDIA A100-SXM4-80GB", memory_bytes=79 * 2**30)
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}, "resources": {"device": "cuda"}})
    cluster = predict_cluster(spec, list_hosts(spec))
    assert (cluster.name, cluster.accelerator.bf16_flops) == (host.name, CLUSTERS["a100-80gb"].accelerator.bf16_flops)


@pytest.mark.parametrize(
    ("change", "resources"),
    [
        ({"labels": ["other"]}, {"labels": ["asked"]}),
        ({"labels": ["other"]}, {"pool": "asked"}),
        ({"drained": True}, {}),
        ({"last_seen": datetime(2026, 1, 1, tzinfo=UTC)}, {}),
        ({"slots": 3}, {}),
    ],
)
def test_ignores_hosts_on_which_the_job_cannot_run(
    change: dict[str, Any], resources: dict[str, Any], make_host: Callable[..., Host]
) -> None:
    """Memory and time must be for a host on which the job can run."""
    Pool.objects.create(name="asked", labels=["asked"])
    make_host("a", slots=8)
    make_host("b", slots=4)
    Host.objects.update(device="cuda", device_name="NVIDIA A100-SXM4-80GB", labels=["asked"])
    Host.objects.filter(name="a").update(**{"profile": {"of": "an older version"}, **change})
    data = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}, "resources": {"device": "cuda", **resources}}
    spec = parse_spec(data)
    assert predict_cluster(spec, list_hosts(spec)).name == "b"


def test_uses_a_silent_host_only_without_a_live_gang(make_host: Callable[..., Host]) -> None:
    for name, slots in (("large", 4), ("b", 2), ("c", 2)):
        make_host(name, slots)
    Host.objects.update(device="cuda", device_name="NVIDIA A100-SXM4-80GB")
    Host.objects.filter(name="large").update(last_seen=datetime(2026, 1, 1, tzinfo=UTC))
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}, "resources": {"device": "cuda"}})
    assert predict_cluster(spec, list_hosts(spec)).name == "2 hosts like b"
    Host.objects.filter(name="c").update(drained=True)
    assert predict_cluster(spec, list_hosts(spec)).name == "2 hosts like b"
    Host.objects.filter(name="c").delete()
    assert predict_cluster(spec, list_hosts(spec)).name == "large"


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L40", "NVIDIA H100 PCIe", "NVIDIA H800 PCIe", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti"),
        *("NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_marks_a_gpu_without_a_data_sheet(name: str, make_host: Callable[..., Host]) -> None:
    """Names of weaker variants and of MIG slices start like the name of a full GPU."""
    host = make_host()
    host.device, host.device_name = "cuda", name
    cluster = build_host_cluster(host)
    assert cluster.accelerator.name == f"{name} (no data sheet)"
    assert cluster.has_assumed_peak


def test_dry_run_for_gpus_uses_any_host(owner: User, make_host: Callable[..., Host]) -> None:
    """A dry run uses no GPU, so it does not wait for one."""
    spec = {"kind": "dry_run", "model": {"preset": "gpt-tiny"}, "resources": {"device": "cuda"}}
    assert submit(owner, spec)[0].device == "cuda"  # No host is connected yet.
    make_host()
    assert submit(owner, spec)[0].device == "cpu"
    with_host = {**spec, "resources": {"device": "cuda", "host": "host-a"}}
    assert submit(owner, with_host)[0].device == "cpu"
    with pytest.raises(SpecError, match=r"`resources\.host` is 'host-z', but no such cpu host exists\. Use host-a"):
        submit(owner, {**spec, "resources": {"device": "cuda", "host": "host-z"}})
    assert submit(owner, {**spec, "kind": "train"})[0].device == "cuda"
