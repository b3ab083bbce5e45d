"""Every change by a page or the admin writes an audit entry, with listed exceptions."""

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
from tests.jobs.audited_routes import record_audited_routes
from tests.jobs.pages.test_script import FORM as SCRIPT
from tests.jobs.people.test_sign_on import turn_on_second_factor
from tests.jobs.reporting.nodes import Node, fall_silent
from tests.planner.wrong_specs import GOOD
from tests.webapp.test_public_routes import paths

LARGE = {**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2}, "train": {"global_batch": 8, "micro_batches": 2}}
LOGINS = "sessions and django-axes record logins"
IMPORTS = "adds a private file, whose row has its owner and time"
SHOWS = "shows a page or redirects, with every method"
UNAUDITED = {
    **dict.fromkeys(("plan/", "plan/search/", "plan/explain/"), "computes without a change"),
    **dict.fromkeys(("plan/import-model/", "plan/import-layout/"), "computes without a change"),
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
# Bulk actions of admin pages in other packages, except deletion.
UNAUDITED_ACTIONS = {
    "make_verified": "marks a mail address as verified, which has no effect",
    "cleanup_expired_attempts": "deletes failed logins that have expired",
}


def test_every_changing_page_writes_an_audit_entry(
    client: Client, make_host: Callable[..., Host], live_redis: redis.Redis, settings: Any
) -> None:
    owner = User.objects.create_superuser("owner", password="owner-password")
    viewer, team = User.objects.create_user("viewer"), Project.objects.create(name="team")
    make_host()
    with record_audited_routes() as audited:
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
    for name in UNAUDITED:
        assert not [route for _, route in audited if route == name], f"{name} writes an audit entry"
    assert list_changing_routes(owner) - {route for method, route in audited if method == "post"} == set(UNAUDITED)


def list_changing_routes(user: User) -> set[str]:
    """Return the routes of pages that accept POST."""
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
    response = client.post(path, data)
    assert response.status_code in (200, 302), (path, response.content.decode())
    return response.content.decode()


def new_password() -> dict[str, str]:
    return dict.fromkeys(("new_password1", "new_password2"), "quite-another-1")


def account(client: Client) -> None:
    turn_on_second_factor(client)
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
    assert lifecycle.change_status(large.id, 1, Status.LOST, "its host was marked as lost")
    Host.objects.update(slots=4)
    post(client, f"/jobs/{large.id}/smaller/")
    body = {"world_size": 2, "name": "by hand"}
    run = client.post("/api/v1/runs", body, content_type="application/json").json()
    node = Node(run["run"], run["token"])
    node.join("gpu-7")
    node.report()
    fall_silent(node)
    check_external_runs()
    post(client, f"/jobs/{node.run}/give-up/")


def queue(client: Client) -> None:
    first, second = (actions.submit(User.objects.get(username="owner"), GOOD)[0] for _ in range(2))
    post(client, "/queue/act/", action="hold", job=[first.id], confirmed="1")
    response = client.post("/queue/move/", {"job": second.id, "to": "top"}, content_type="application/json")
    assert response.json() == {"moved": True}
    post(client, "/queue/pause/", on="true")


def hosts(client: Client, viewer: User) -> None:
    for action in ("calibrate", "drain", "undrain"):
        post(client, f"/hosts/host-a/{action}/")
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    for action in ("give-up", "remove"):
        post(client, f"/hosts/host-a/{action}/")
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


def test_admin_changes_write_audit_entries(client: Client, make_host: Callable[..., Host]) -> None:
    """No entry contains the text of a password, a session, or a token."""
    client.force_login(User.objects.create_superuser("root"))
    host, group = make_host(), Group.objects.create(name="crew")
    passwords = dict.fromkeys(("password1", "password2"), "quite-a-secret-1")
    assert client.post("/admin/auth/user/add/", {"username": "ann", **passwords}).status_code == 302
    ann = User.objects.get(username="ann")
    join_date = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    form = {"username": "ann", "is_active": "on", "is_staff": "on", **join_date}
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
    entries = (
        AuditEntry.objects.filter(who="root").exclude(kind="token").order_by("id").values_list("what", "kind", "name")
    )
    assert [*entries] == [
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


def test_every_model_admin_writes_audit_entries() -> None:
    admins = {m: admin.site.get_model_admin(m) for m in apps.get_models() if admin.site.is_registered(m)}
    assert len(admins) > 15
    for model, model_admin in admins.items():
        assert isinstance(model_admin, AuditedAdmin | SingleColumnAdmin | AccountAdmin | DeadLetterAdmin), model
        if isinstance(model_admin, AccountAdmin):
            assert {*model_admin.actions} <= set(UNAUDITED_ACTIONS), model
