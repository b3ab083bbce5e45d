"""Whatever a page or the admin changes is in the audit, or stands here with why it is not; REST: test_answers.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import redis
from allauth.socialaccount.models import SocialAccount
from allauth.usersessions.models import UserSession
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import resolve
from django.utils import timezone
from knox.models import AuthToken

from jobs.admin.accounts import AccountAdmin
from jobs.admin.hosts import DeadLetterAdmin
from jobs.admin.shared import AuditedAdmin, SingleColumnAdmin
from jobs.models import Attempt, AuditEntry, Delivery, Host, Invitation, Job, JoinToken, Project, Status, Webhook
from jobs.people.invitations import InvitationRequest, create_invitation
from jobs.queue import actions, lifecycle
from jobs.queue.inbound.reconcile import check_external_runs
from tests.jobs.pages.test_script import FORM as SCRIPT
from tests.jobs.people.test_signing_on import with_second_factor
from tests.jobs.reporting.nodes import Node, fall_silent
from tests.jobs.written import written
from tests.planner.wrong_specs import GOOD
from tests.webapp.test_public import paths

LARGE = {**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2}, "train": {"global_batch": 8, "micro_batches": 2}}
LOGINS = "who is logged in stands among their sessions, and django-axes keeps who tried"
IMPORTS = "a file of one's own for 30 days, with its owner and time in its row; nothing of the board's changes"
SHOWS = "shows or leads to the same, whatever the method"
UNWRITTEN = {
    **dict.fromkeys(("plan/", "plan/search/", "plan/explain/"), "computes, and changes nothing"),
    **dict.fromkeys(("login/", "login/again/", "logout/", "account/two-factor/authenticate/"), LOGINS),
    "account/two-factor/reauthenticate/": LOGINS,
    **dict.fromkeys(("favicon.ico", "jobs/", "login/new/", "login/closed/", "login/cancelled/"), SHOWS),
    "account/two-factor/": SHOWS,
    **dict.fromkeys(("what-if/", "learn/", "lab/", "lab/<slug:slug>/"), SHOWS),
    "login/oidc/<str:provider_id>/login/callback/": LOGINS,
    "account/two-factor/recovery-codes/download/": SHOWS,
    **dict.fromkeys(("import/begin/", "import/<str:key>/read/", "import/<str:key>/delete/"), IMPORTS),
    "import/<str:key>/files/<int:place>/": IMPORTS,
}
# Of the admin of what is not ours: bulk actions besides deleting.
UNWRITTEN_ACTIONS = {
    "make_verified": "of a mail address: this board verifies none, and nothing asks",
    "cleanup_expired_attempts": "forgets failed logins that lock nobody out any more",
}


def test_every_page_that_changes_something_writes_it_down(
    client: Client, make_host: Callable[..., Host], live_redis: redis.Redis, settings: Any
) -> None:
    owner = User.objects.create_superuser("owner", password="owner-password")
    viewer, team = User.objects.create_user("viewer"), Project.objects.create(name="team")
    make_host()
    with written() as wrote:
        account(client)
        jobs(client)
        queue(client)
        hosts(client, viewer)
        webhooks(client)
        project(client, team)
        client.post("/notifications/", {"project:": ["failed"]})
        settings.EMAIL_HOST = "mail.example"
        User.objects.filter(pk=owner.pk).update(email="owner@people.example")
        last, _ = actions.submit(owner, GOOD)
        post(client, f"/jobs/{last.id}/end-mail/")
        settings.EMAIL_HOST = ""
        post(client, "/account/password/", old_password="owner-password", **new_password())
    for name in UNWRITTEN:
        assert not [route for _, route in wrote if route == name], f"{name} is written down after all"
    assert changing(owner) - {route for method, route in wrote if method == "post"} == set(UNWRITTEN)


def changing(user: User) -> set[str]:
    """Routes of pages that take a POST."""
    user.refresh_from_db()
    found = set()
    for path in paths():
        if not path.startswith(("api/", "admin/")):
            client = Client(raise_request_exception=False)
            client.force_login(user)
            if client.post(f"/{path}").status_code != 405:
                found.add(resolve(f"/{path}").route)
    return found


def post(client: Client, path: str, **data: Any) -> str:
    answer = client.post(path, data)
    assert answer.status_code in (200, 302), (path, answer.content.decode())
    return answer.content.decode()


def new_password() -> dict[str, str]:
    return dict.fromkeys(("new_password1", "new_password2"), "quite-another-1")


def account(client: Client) -> None:
    with_second_factor(client)
    post(client, "/account/two-factor/recovery-codes/generate/")
    post(client, "/account/two-factor/totp/deactivate/")
    identity = SocialAccount.objects.create(user=User.objects.get(username="owner"), provider="board", uid="42")
    post(client, f"/account/sign-on/{identity.pk}/remove/")
    Client().post("/login/", {"username": "owner", "password": "owner-password"})
    newest = UserSession.objects.latest("pk")
    post(client, f"/account/sessions/{newest.pk}/end/")
    post(client, "/account/tokens/", name="ci", scopes=["read"], days="3")
    post(client, f"/account/tokens/{AuthToken.objects.get().token_key}/revoke/")


def jobs(client: Client) -> None:
    post(client, "/jobs/new/", spec=json.dumps(GOOD))
    post(client, f"/jobs/{Job.objects.get(kind='train').id}/check/")
    post(client, "/jobs/script/", **SCRIPT)
    post(client, "/collectives/", **{"resources.host": "host-a", "layout.dp": "2"})
    job = Job.objects.get(kind="train", check_of=None)
    post(client, "/jobs/act/", action="tag", job=[job.id], tags="ci")
    post(client, f"/jobs/{job.id}/cancel/")
    post(client, f"/jobs/{job.id}/requeue/")
    Host.objects.update(slots=8)
    large, _ = actions.submit(job.owner, LARGE)
    Attempt.objects.create(job=large, number=1, checkpoint=f"{large.id}/1/step-00000020", ended=timezone.now())
    assert lifecycle.start_jobs({large.id: (1, "placed")})
    assert lifecycle.change_status(large.id, 1, Status.LOST, "its host was given up")
    Host.objects.update(slots=4)
    post(client, f"/jobs/{large.id}/smaller/")
    asked = {"world_size": 2, "name": "by hand"}
    opened = client.post("/api/v1/runs", asked, content_type="application/json").json()
    node = Node(opened["run"], opened["token"])
    node.join("gpu-7")
    node.report()
    fall_silent(node)
    check_external_runs()
    post(client, f"/jobs/{node.run}/give-up/")


def queue(client: Client) -> None:
    first, second = (actions.submit(User.objects.get(username="owner"), GOOD)[0] for _ in range(2))
    post(client, "/queue/act/", action="hold", job=[first.id], confirmed="1")
    moved = client.post("/queue/move/", {"job": second.id, "to": "top"}, content_type="application/json")
    assert moved.json() == {"moved": True}
    post(client, "/queue/pause/", on="true")


def hosts(client: Client, viewer: User) -> None:
    for deed in ("calibrate", "drain", "undrain"):
        post(client, f"/hosts/host-a/{deed}/")
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    for deed in ("give-up", "remove"):
        post(client, f"/hosts/host-a/{deed}/")
    post(client, "/join-tokens/", note="rack 7", hours="2", uses="3")
    post(client, f"/join-tokens/{JoinToken.objects.get().pk}/revoke/")


def webhooks(client: Client) -> None:
    post(client, "/projects/default/webhooks/make/", name="chat", url="https://chat.example/7")
    hook = f"/projects/default/webhooks/{Webhook.objects.get().id}"
    post(client, f"{hook}/change/", active="false")
    post(client, f"{hook}/ping/")
    post(client, f"{hook}/rotate/")
    Delivery.objects.update(due=None, outcome="delivered")
    post(client, f"{hook}/deliveries/{Delivery.objects.get().key}/again/")
    post(client, f"{hook}/delete/")


def project(client: Client, team: Project) -> None:
    post(client, "/projects/team/quota/", own_slots="3")
    post(client, "/projects/team/members/", user="viewer", role="viewer")
    post(client, "/projects/team/members/remove/", user="viewer")
    post(client, "/projects/team/invitations/", role="viewer", days="3")
    post(client, "/projects/team/invitations/revoke/", id=str(Invitation.objects.get().pk))
    post(client, "/projects/team/variables/", name="JOB_X", value="x")
    post(client, "/projects/team/variables/remove/", name="JOB_X")
    post(client, f"/invitations/?token={create_invitation(team, InvitationRequest(role='viewer'), 'owner')[1]}")


def test_what_staff_change_in_the_admin_is_written_down(client: Client, make_host: Callable[..., Host]) -> None:
    """Accounts and their rights above all; and a session's or token's own text is in no entry."""
    client.force_login(User.objects.create_superuser("root"))
    host, group = make_host(), Group.objects.create(name="crew")
    passwords = dict.fromkeys(("password1", "password2"), "quite-a-secret-1")
    assert client.post("/admin/auth/user/add/", {"username": "ann", **passwords}).status_code == 302
    ann = User.objects.get(username="ann")
    joined = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    form = {"username": "ann", "is_active": "on", "is_staff": "on", **joined}
    assert client.post(f"/admin/auth/user/{ann.pk}/change/", form).status_code == 302
    assert User.objects.get(username="ann").is_staff
    job, _ = actions.submit(ann, GOOD)
    actions.cancel(job, "ann")
    token, _ = AuthToken.objects.create(ann)
    selected = {"action": "delete_selected", "post": "yes"}
    for path, data in (
        (f"knox/authtoken/{token.pk}/delete/", {"post": "yes"}),
        (f"auth/user/{ann.pk}/password/", passwords),
        ("auth/group/", {**selected, "_selected_action": [group.pk]}),
        ("jobs/host/", {"action": "drain", "_selected_action": [host.pk]}),
        (f"jobs/job/{job.id}/delete/", {"post": "yes"}),
        ("auth/user/", {**selected, "_selected_action": [ann.pk]}),
    ):
        assert client.post(f"/admin/{path}", data).status_code == 302, path
    told = (
        AuditEntry.objects.filter(who="root").exclude(kind="token").order_by("id").values_list("what", "kind", "name")
    )
    assert [*told] == [
        ("add", "user", "ann"),
        ("edit", "user", "ann"),
        ("delete", "authtoken", token.pk[:100]),
        ("edit", "user", "ann"),
        ("delete", "group", str(group.pk)),
        ("drain", "host", "host-a"),
        ("delete", "job", job.id),
        ("delete", "user", "ann"),
    ]
    rights = AuditEntry.objects.filter(who="root", kind="user", what="edit").earliest("id")
    assert rights.after == [{"changed": {"fields": ["Staff status", "Date joined"]}}]
    assert passwords["password1"] not in str([*AuditEntry.objects.values()])


def test_every_admin_is_one_that_writes_down() -> None:
    ours = {m: admin.site.get_model_admin(m) for m in apps.get_models() if admin.site.is_registered(m)}
    assert len(ours) > 15
    for model, made in ours.items():
        assert isinstance(made, AuditedAdmin | SingleColumnAdmin | AccountAdmin | DeadLetterAdmin), model
        if isinstance(made, AccountAdmin):
            assert {*made.actions} <= set(UNWRITTEN_ACTIONS), model
