"""Pages of hosts show slots and load, and hide the jobs of other users."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.forms import model_to_dict
from django.utils import timezone

from jobs.models import Host, JoinToken, Member, Pool, SlotAllocation
from jobs.operations.metrics.collection import SLOTS, collect_metrics
from jobs.planning.hosts import get_measured_hosts
from jobs.queue import actions
from jobs.queue.hosts.checks import is_version_mismatch, list_host_versions
from jobs.queue.hosts.presentation import MAX_LEGEND_ENTRIES, build_grid, get_contact_state
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.conftest import host_event, send_event
from tests.planner.wrong_specs import GOOD

MakeHost = Callable[..., Host]


def running(owner: User, name: str, host: str) -> str:
    job, _ = actions.submit(owner, {**GOOD, "name": name, "resources": {"host": host}})
    schedule()
    assert Member.objects.filter(attempt__job=job).exists()
    return job.id


def silent(host: Host, seconds: float = 60) -> None:
    Host.objects.filter(pk=host.pk).update(last_seen=timezone.now() - timedelta(seconds=seconds))


@pytest.fixture
def two_jobs(owner: User, stranger: User, make_host: MakeHost) -> tuple[str, str]:
    """Create two jobs of two users on two hosts."""
    for name in ("host-a", "host-b"):
        make_host(name, slots=8)
    return running(owner, "the owner's <b>job</b>", "host-a"), running(stranger, "the stranger's", "host-b")


def test_slots_have_color_and_link_of_their_job(two_jobs: tuple[str, str], owner: User, client: Any) -> None:
    client.force_login(owner)
    page = client.get("/hosts/").content.decode()
    held = SlotAllocation.objects.filter(host__name="host-a").count()
    assert len(re.findall(rf'<a class="slot slot-0" href="/jobs/{two_jobs[0]}/"', page)) == held
    assert "the owner&#x27;s &lt;b&gt;job&lt;/b&gt;" in page
    assert two_jobs[1] not in page
    assert "the stranger" not in page
    assert page.count('class="slot slot-foreign" role="img"') == SlotAllocation.objects.count() - held


def test_staff_see_owners_of_jobs_on_hosts(two_jobs: tuple[str, str], staff: User, client: Any) -> None:
    client.force_login(staff)
    page = client.get("/hosts/host-b/").content.decode()
    assert f'href="/jobs/{two_jobs[1]}/"' in page
    assert "slot-foreign" not in page


def test_rest_names_only_visible_jobs_of_slots(
    two_jobs: tuple[str, str], owner: User, staff: User, api: Callable[..., Any]
) -> None:
    mine = api(owner).get("/api/v1/hosts/host-a").json()
    assert {slot["job"] for slot in mine["held"]} == {two_jobs[0]}
    assert {slot["job"] for slot in api(owner).get("/api/v1/hosts/host-b").json()["held"]} == {None}
    assert {slot["job"] for slot in api(staff).get("/api/v1/hosts/host-b").json()["held"]} == {two_jobs[1]}
    assert api(owner).get("/api/v1/hosts/nowhere").status_code == 404


def test_host_list_has_no_query_per_host(
    staff: User, make_host: MakeHost, client: Any, django_assert_max_num_queries: Any
) -> None:
    for number in range(100):
        make_host(f"host-{number:03}", slots=64)
    client.force_login(staff)
    with django_assert_max_num_queries(12):
        page = client.get("/hosts/").content.decode()
    assert page.count('class="panel host-card"') == 100
    with django_assert_max_num_queries(12):
        assert client.get("/hosts/?part=grid").status_code == 200
    with django_assert_max_num_queries(12):
        assert len(client.get("/api/v1/hosts").json()) == 100


def test_host_list_has_pages_search_and_filters(staff: User, make_host: MakeHost, client: Any) -> None:
    first = make_host("rack-0-node-0", slots=8)
    more = [
        Host(**{**model_to_dict(first), "id": None, "name": f"rack-{n // 40}-node-{n % 40}"}) for n in range(1, 1000)
    ]
    Host.objects.bulk_create(more)
    silent(Host.objects.get(name="rack-7-node-7"))
    client.force_login(staff)
    page = client.get("/hosts/").content.decode()
    assert page.count('class="panel host-card"') == 100
    assert "999 connected · 1 silent · 7,992 of 8,000 slots free" in page
    assert "1 to 100 of 1,000" in page
    last = client.get("/hosts/?part=grid&page=10").content.decode()
    assert "901 to 1,000 of 1,000" in last
    rack = client.get("/hosts/?q=RACK-7-&page=99").content.decode()
    assert rack.count('class="panel host-card"') == 40
    assert "?part=grid" not in re.findall(r'hx-get="([^"]*)"', rack)[0], "live updates use the same filters"
    for state, number in (("silent", 1), ("lost", 0), ("<b>", 1000)):
        page = client.get("/hosts/", {"q": "node", "state": state}).content.decode()
        assert page.count('class="panel host-card"') == min(100, number)
        assert "<b>" not in page


def test_free_slots_agree_with_the_scheduler(
    staff: User, make_host: MakeHost, client: Any, api: Callable[..., Any]
) -> None:
    for name in ("speaks", "drained", "silent", "lost", "paused", "left-over"):
        make_host(name, slots=2)
    named = {host.name: Host.objects.filter(pk=host.pk) for host in Host.objects.all()}
    for name in ("silent", "lost"):
        silent(named[name].get())
    named["drained"].update(drained=True)
    named["lost"].update(given_up=timezone.now())
    named["paused"].update(labels=["old"])
    named["left-over"].update(holding=[["j000000000", 1, [1]]])
    Pool.objects.create(name="rack", labels=["old"], paused=True)
    expected = {"speaks": 2, "drained": 0, "silent": 0, "lost": 0, "paused": 0, "left-over": 1}
    asked = api(staff)
    assert {host["name"]: host["free_slots"] for host in asked.get("/api/v1/hosts").json()} == expected
    assert {name: asked.get(f"/api/v1/hosts/{name}").json()["free_slots"] for name in named} == expected
    assert asked.get("/api/v1/hosts/left-over").json()["held"] == [{"slot": 1, "job": None}]
    client.force_login(staff)
    page = client.get("/hosts/?part=grid").content.decode()
    assert "1 silent · 1 lost · 3 of 12 slots free" in page
    assert dict(re.findall(r">([a-z-]+)</a></h2>.*? · (\d) of 2 slots free<", page, re.DOTALL)) == {
        name: str(free) for name, free in expected.items()
    }
    assert (page.count(': free" aria'), page.count(': not accepting jobs" aria')) == (3, 8)
    for name, free in expected.items():
        assert f"{free} of 2 free" in client.get(f"/hosts/{name}/").content.decode()
    told = collect_metrics()[SLOTS]
    assert (told["cpu", "free"], told["cpu", "unusable"]) == (3, 9)
    assert "3 GPU or CPU slots are ready" in client.get("/overview/?part=live").content.decode()
    told_by_admin = client.get("/admin/jobs/host/").content.decode()
    assert [int(free) for free in re.findall(r"field-free[^>]*>\s*(\d)", told_by_admin)] == [
        expected[name] for name in re.findall(r"host/\d+/change/[^>]*>\s*([a-z-]+)\s*</a>", told_by_admin)
    ]


def test_legend_is_limited_and_counts_the_rest(owner: User, make_host: MakeHost) -> None:
    host = make_host("host-a", slots=200)
    for number in range(MAX_LEGEND_ENTRIES + 3):
        running(owner, f"job {number}", "host-a")
    told = build_grid([host], owner, {})
    assert (len(told.legend), told.more, told.foreign) == (MAX_LEGEND_ENTRIES, 3, 0)
    assert sum(slot.job is not None for slot in told.hosts[0].slots) == SlotAllocation.objects.count()


def test_describes_the_state_of_a_host(make_host: MakeHost, owner: User, client: Any) -> None:
    host = make_host()
    assert get_contact_state(host) == "connected"
    actions_drained = Host.objects.filter(pk=host.pk)
    actions_drained.update(drained=True)
    host.refresh_from_db()
    assert get_contact_state(host) == "drained"
    silent(host)
    host.refresh_from_db()
    assert get_contact_state(host) == "silent"
    client.force_login(owner)
    Host.objects.filter(pk=host.pk).update(last_seen=timezone.now() - timedelta(days=3))
    host.refresh_from_db()
    told = f"silent since {host.last_seen.day} {host.last_seen:%b %Y %H:%M:%S} UTC"
    assert told in client.get("/hosts/").content.decode()
    actions.mark_host_lost(host, "staff")
    host.refresh_from_db()
    assert get_contact_state(host) == "lost"
    Host.objects.filter(pk=host.pk).update(last_seen=timezone.now())
    host.refresh_from_db()
    assert get_contact_state(host) == "drained", "it is back"


DEEDS = ["drain", "undrain", "give-up", "remove", "calibrate"]


@pytest.mark.parametrize("deed", DEEDS)
def test_only_staff_with_rights_change_hosts(
    owner: User, viewer: User, make_host: MakeHost, client: Any, api: Callable[..., Any], deed: str
) -> None:
    make_host()
    before = Host.objects.values().get()
    for who in (owner, viewer):
        client.force_login(who)
        assert client.post(f"/hosts/host-a/{deed}/").status_code == 403
        assert client.get(f"/hosts/host-a/{deed}/").status_code == 405
        assert api(who).post(f"/api/v1/hosts/host-a/{deed}").status_code == 403
        page = client.get("/hosts/host-a/").content.decode()
        assert "data-opens" not in page
        assert "Join tokens" not in client.get("/hosts/").content.decode()
        assert client.post("/join-tokens/", {"hours": "1"}).status_code == 403
    assert Host.objects.values().get() == before
    assert not JoinToken.objects.exists()


def test_staff_change_hosts_on_the_page(
    two_jobs: tuple[str, str], staff: User, client: Any, live_redis: redis.Redis
) -> None:
    client.force_login(staff)
    host = Host.objects.get(name="host-a")

    def does(deed: str) -> str:
        return client.post(f"/hosts/host-a/{deed}/", follow=True).content.decode()

    assert "is drained" in does("drain")
    assert "is undrained" in does("undrain")
    assert "has contact again" in does("give-up")
    assert "host-a still has an unfinished attempt" in does("remove")
    silent(host)
    assert "and 1 attempt as lost." in does("give-up")
    assert "Removed host" in does("remove")
    assert client.get("/hosts/host-a/").status_code == 404
    assert "host-a" not in re.sub(r"role=\"status\">.*?<", "", client.get("/hosts/").content.decode())


def test_staff_change_hosts_over_rest(
    two_jobs: tuple[str, str], staff: User, api: Callable[..., Any], live_redis: redis.Redis
) -> None:
    asked = api(staff)
    Host.objects.update(profile={})
    assert asked.post("/api/v1/hosts/host-a/drain").json()["state"] == "drained"
    assert asked.post("/api/v1/hosts/host-a/undrain").json()["drained"] is False
    assert asked.post("/api/v1/hosts/host-a/remove").status_code == 409
    silent(Host.objects.get(name="host-a"))
    assert asked.post("/api/v1/hosts/host-a/give-up").json() == {"lost": 1}
    assert asked.post("/api/v1/hosts/host-a/remove").status_code == 204
    assert list(get_measured_hosts().values_list("name", flat=True)) == ["host-b"], "nor is it planned for"
    for path in ("", "/profile"):
        assert asked.get(f"/api/v1/hosts/host-a{path}").status_code == 404
    assert [host["name"] for host in asked.get("/api/v1/hosts").json()] == ["host-b"]


def test_page_shows_a_join_token_once(staff: User, client: Any) -> None:
    client.force_login(staff)
    assert "No hosts yet" in client.get("/hosts/").content.decode()
    answer = client.post("/join-tokens/", {"note": "rack 7", "hours": "2", "uses": "3"})
    page = answer.content.decode()
    [text] = re.findall(r"MESHBOARD_JOIN_TOKEN=(\S+) .venv/bin/python -m workers.host.join http://testserver", page)
    assert answer["Cache-Control"] == "no-store"
    token = JoinToken.objects.get()
    assert (token.note, token.most_uses, token.created_by) == ("rack 7", 3, "staff")
    assert timedelta(hours=1.9) < token.expires - timezone.now() <= timedelta(hours=2)
    listed = client.get("/hosts/").content.decode()
    assert "rack 7" in listed
    assert text not in listed
    for wrong, field in (({"hours": "0"}, "hours"), ({"hours": "x"}, "hours"), ({"hours": "1", "uses": "-1"}, "uses")):
        assert f"<code>{field}</code> is " in client.post("/join-tokens/", wrong, follow=True).content.decode()
    assert JoinToken.objects.count() == 1
    assert (
        "Hosts that joined with the token stay on the board."
        in client.post(f"/join-tokens/{token.pk}/revoke/", follow=True).content.decode()
    )
    assert client.post("/join-tokens/999999999999999999999/revoke/").status_code == 404


FACTS: dict[str, Any] = {
    "cores": 96,
    "memory_bytes": 2**40,
    "numa_nodes": 2,
    "gpus": [{"model": "<img src=x>", "memory_bytes": 80 * 2**30, "uuid": "GPU-0", "numa": 1}],
    "links": [],
    "nics": [{"name": "ens1", "addresses": ["10.0.0.7"], "megabits_per_s": 100_000}],
    "versions": {"python": "3.9.1", "meshboard": "0.0.1", "torch": "2.13.0+cu130"},
    "limits": "2 CPUs (not enforced); 50 open files per process (rlimit). No control groups: the kernel has none",
}
USE: dict[str, Any] = {
    "gpus": [{"busy_percent": 73.0, "memory_bytes": 40 * 2**30, "celsius": 61.0}],
    "disks": [{"use": "runs", "path": "/x", "free_bytes": 2**30, "total_bytes": 2**40}],
    "clock_offset_s": -300.25,
    "round_trip_s": 0.001,
}


def test_page_shows_facts_of_a_host(staff: User, client: Any, api: Callable[..., Any], live_redis: redis.Redis) -> None:
    send_event(live_redis, host_event(slots=1, facts=FACTS, use=USE, device="cuda"))
    read_events(live_redis)
    client.force_login(staff)
    page = client.get("/hosts/host-a/").content.decode()
    for words in (
        "73%",
        "40 GiB",
        "61 \N{DEGREE SIGN}C",
        "100,000",
        "10.0.0.7",
        "-300.250 s \N{PLUS-MINUS SIGN} 0.001 s",
        "&lt;img src=x&gt;",
        "1.0 GiB free of 1.0 TiB",
        '2 CPUs</th><td class="wrap">not enforced</td>',
        '50 open files per process</th><td class="wrap">rlimit</td>',
        'no control groups</th><td class="wrap">the kernel has none</td>',
    ):
        assert words in page, words
    assert "<img src=x>" not in page
    assert page.count(">differs<") == 2, "Python and Meshboard; torch is what the board asks for"
    told = api(staff).get("/api/v1/hosts/host-a").json()
    assert (told["facts"], told["use"]) == (FACTS, USE)
    send_event(live_redis, host_event(slots=1, device="cuda"))
    read_events(live_redis)
    host = Host.objects.get()
    assert (host.facts, host.use) == (FACTS, None), "facts stay, and usage is from the last heartbeat"
    send_event(live_redis, host_event(slots=1, use=USE, device="cuda"))
    read_events(live_redis)
    silent(host)
    assert "73%" not in client.get("/hosts/host-a/").content.decode(), "a silent host's use is old"


def test_only_staff_see_addresses_paths_and_serial_numbers(
    owner: User, staff: User, client: Any, api: Callable[..., Any], live_redis: redis.Redis
) -> None:
    send_event(live_redis, host_event(slots=1, facts=FACTS, use=USE, device="cuda", address="10.0.0.7"))
    read_events(live_redis)
    Host.objects.update(joined=timezone.now(), joined_from="10.9.9.9")
    secrets = ("10.0.0.7", "10.9.9.9", "GPU-0", '"/x"')
    for user, seen in ((staff, True), (owner, False)):
        client.force_login(user)
        page = client.get("/hosts/host-a/").content.decode() + client.get("/hosts/host-a/?part=live").content.decode()
        told = api(user).get("/api/v1/hosts/host-a").content.decode()
        assert {secret: secret in page + told for secret in secrets} == dict.fromkeys(secrets, seen)
        assert "100,000" in page, "all users see the speed of an interface"


@pytest.mark.parametrize(
    ("key", "told", "expected", "apart"),
    [
        ("python", "3.11.2", "3.11.9", False),
        ("python", "3.12.0", "3.11.9", True),
        ("torch", "2.13.0+cpu", "2.13.0", False),
        ("torch", "2.12.1", "2.13.0", True),
        ("driver", "595.10", "", False),
    ],
)
def test_finds_version_mismatches(key: str, told: str, expected: str, apart: bool) -> None:
    assert is_version_mismatch(key, told, expected) is apart


def test_board_knows_the_required_torch_version() -> None:
    told = {v.name: v for v in list_host_versions({"versions": {"torch": "2.0.0", "python": "3.11.0"}})}
    assert told["torch"].differs
    assert re.fullmatch(r"2\.\d+\.\d+", told["torch"].expected)
