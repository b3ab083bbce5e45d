"""A submit asks the database once for each thing it has to know."""

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

# The token with its owner and grant, hosts, project, a savepoint and its end, the job, its state, who wants to be told,
# the audit's entry; then on which hosts something ran, the host planned for, and its runs.
ALONE, WITH_HOSTS = 9, 12


@pytest.mark.parametrize(("hosts", "most"), [(0, ALONE), (40, WITH_HOSTS)])
def test_a_submit_asks_for_each_thing_once(
    hosts: int,
    most: int,
    owner: User,
    api: Callable[[User], APIClient],
    make_host: Callable[..., Host],
    django_assert_max_num_queries: Any,
) -> None:
    for number in range(hosts):
        make_host(f"host-{number}", slots=8)
    Host.objects.filter(name="host-7").update(profile={"of": "an older version"})
    client = api(owner)
    with django_assert_max_num_queries(most):
        made = client.post("/api/v1/jobs", GOOD, format="json")
    assert made.status_code == 201
    told = client.get(f"/api/v1/jobs/{made.json()['id']}").json()
    assert told == made.json(), "as it is told by whoever asks for it later"
    assert Job.objects.get().hardware["name"] == ("host-7" if hosts else get_default_cluster(parse_spec(GOOD)).name)


def test_a_host_that_goes_while_a_job_is_submitted_leaves_the_data_sheet(db: None) -> None:
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


def test_a_cpu_that_nobody_measured_is_planned_for_by_the_cores_that_it_tells_of(
    make_host: Callable[..., Host],
) -> None:
    """Four ranks on two cores, and products in bf16 of a core that has none, were planned as on cores of their own."""
    spec = parse_spec({**GOOD, "layout": {"dp": 4}, "train": {**GOOD["train"], "precision": "bf16"}})
    host = make_host(slots=4)
    told = [get_step_timing(spec, predict_cluster(spec, list_hosts(spec))).compute_s]
    for facts in ({"cores": 4, "bf16": "native"}, {"cores": 2, "bf16": "native"}, {"cores": 2, "bf16": "scalar"}):
        Host.objects.update(facts=facts)
        cluster = predict_cluster(spec, list_hosts(spec))
        assert (cluster.name, cluster.cores) == (host.name, facts["cores"])
        told.append(get_step_timing(spec, cluster).compute_s)
    default, alone, crowded, scalar = told
    assert default == alone
    assert crowded == pytest.approx(2 * alone)
    assert scalar > 4 * crowded


def test_another_engines_hosts_are_not_known(make_host: Callable[..., Host]) -> None:
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
    ],
)
def test_a_host_is_planned_for_by_the_data_sheet_of_its_own_gpu(
    device_name: str, gib: int, sheet: str, make_host: Callable[..., Host]
) -> None:
    """An A100 that nothing had run on was given the rates of an H100 under its own name."""
    host = make_host()
    host.device, host.device_name, host.memory_bytes = "cuda", device_name, gib * 2**30
    made = build_host_cluster(host)
    own = {"name": device_name, "memory_bytes": gib * 2**30}
    assert made.accelerator == CLUSTERS[sheet].accelerator.model_copy(update=own)
    assert made.node == CLUSTERS[sheet].node
    assert build_cluster_like(host, 4).network == CLUSTERS[sheet].network


def test_a_job_is_planned_for_the_gpus_that_are_there(make_host: Callable[..., Host]) -> None:
    """On a board of A100s that nothing had run on, H100s were planned for."""
    host = make_host()
    Host.objects.update(device="cuda", device_name="NVIDIA A100-SXM4-80GB", memory_bytes=79 * 2**30)
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}, "resources": {"device": "cuda"}})
    made = predict_cluster(spec, list_hosts(spec))
    assert (made.name, made.accelerator.bf16_flops) == (host.name, CLUSTERS["a100-80gb"].accelerator.bf16_flops)


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"labels": ["other"]}, {"labels": ["asked"]}),
        ({"labels": ["other"]}, {"pool": "asked"}),
        ({"drained": True}, {}),
        ({"last_seen": datetime(2026, 1, 1, tzinfo=UTC)}, {}),
        ({"slots": 3}, {}),
    ],
)
def test_a_job_is_planned_for_no_host_that_does_not_take_it(
    changed: dict[str, Any], asked: dict[str, Any], make_host: Callable[..., Host]
) -> None:
    """The first known host was planned for: memory and time were of an H100 where the job could only run on an A100."""
    Pool.objects.create(name="asked", labels=["asked"])
    make_host("a", slots=8)
    make_host("b", slots=4)
    Host.objects.update(device="cuda", device_name="NVIDIA A100-SXM4-80GB", labels=["asked"])
    Host.objects.filter(name="a").update(**{"profile": {"of": "an older version"}, **changed})
    data = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}, "resources": {"device": "cuda", **asked}}
    spec = parse_spec(data)
    assert predict_cluster(spec, list_hosts(spec)).name == "b"


def test_a_silent_host_is_planned_for_only_where_no_gang_is_there(make_host: Callable[..., Host]) -> None:
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


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"])
def test_rates_of_a_gpu_without_a_data_sheet_are_told_to_be_none_of_its(
    name: str, make_host: Callable[..., Host]
) -> None:
    """A card of less power, or a slice of a GPU, has a name that begins as that of a whole one."""
    host = make_host()
    host.device, host.device_name = "cuda", name
    assert build_host_cluster(host).accelerator.name == f"{name} (no data sheet)"


def test_a_dry_run_of_a_gpu_takes_a_slot_of_any_host(owner: User, make_host: Callable[..., Host]) -> None:
    """It computes on none: on a board without GPUs it waited for ever for one."""
    spec = {"kind": "dry_run", "model": {"preset": "gpt-tiny"}, "resources": {"device": "cuda"}}
    assert submit(owner, spec)[0].device == "cuda"  # nobody knows yet what hosts there will be
    make_host()
    assert submit(owner, spec)[0].device == "cpu"
    named = {**spec, "resources": {"device": "cuda", "host": "host-a"}}
    assert submit(owner, named)[0].device == "cpu"
    with pytest.raises(SpecError, match=r"`resources\.host` is 'host-z', but no such cpu host exists\. Use host-a"):
        submit(owner, {**spec, "resources": {"device": "cuda", "host": "host-z"}})
    assert submit(owner, {**spec, "kind": "train"})[0].device == "cuda"
