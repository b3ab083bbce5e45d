"""REST tokens: their scopes on every route, their visibility, and their expiry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from knox.models import AuthToken
from rest_framework.test import APIClient

from jobs.api import openapi
from jobs.models import AuditEntry, Job, Project, TokenGrant
from jobs.people import tokens
from jobs.people.tokens import ApiTokenRequest
from jobs.queue import actions
from tests.jobs.people.plaintext import find_tables_with
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
SCOPES = ("read", "submit", "operate")
# Routes that change data with the scope `submit`. All other routes that change data need `operate`.
SUBMIT_ROUTES = r"/api/v1/(jobs|runs|lab|imports|uploads)(/.*)?"
PLAN_ROUTES = r"/api/v1/plan(/.*)?"  # Changes nothing, with any method.
# These routes use another kind of token.
OTHER_TOKENS = ("/api/v1/hosts/join", "/api/v1/runs/{run}/{attempt}/members", "/api/v1/runs/{run}/{attempt}/upload")


def make_client(user: User, *scopes: str) -> APIClient:
    text = tokens.create_token(user, ApiTokenRequest.model_validate({"name": "t", "scopes": [*scopes]})).text
    return APIClient(headers={"Authorization": f"Token {text}"})


def list_routes() -> list[tuple[str, str]]:
    return sorted(
        (method.upper(), path)
        for path, item in openapi.get_document()["paths"].items()
        for method in item
        if not path.startswith(OTHER_TOKENS)
    )


def test_token_of_staff_without_a_second_factor_has_no_staff_rights(
    staff: User, owner: User, make_host: Callable[..., Any], settings: Any
) -> None:
    make_host()
    job, _ = actions.submit(owner, GOOD)
    client = make_client(staff, *SCOPES)
    requests = [("get", f"jobs/{job.id}"), ("post", f"jobs/{job.id}/cancel"), ("post", "hosts/host-a/drain")]
    settings.STAFF_SECOND_FACTOR = True
    refused = [getattr(client, method)(f"/api/v1/{path}").status_code for method, path in requests]
    assert refused == [404, 404, 403]
    assert client.get("/api/v1/jobs").json() == []
    staff.refresh_from_db()
    assert staff.is_staff
    Authenticator.objects.create(user=staff, type=Authenticator.Type.TOTP, data={})
    accepted = [getattr(client, method)(f"/api/v1/{path}").status_code for method, path in requests]
    assert accepted == [200, 200, 200]


def test_every_route_requires_its_scope(staff: User) -> None:
    """A token without the required scope is rejected, and a token with only that scope is accepted."""
    clients = {scope: make_client(staff, scope) for scope in SCOPES}
    others = {scope: make_client(staff, *(other for other in SCOPES if other != scope)) for scope in SCOPES}
    num_routes = dict.fromkeys(SCOPES, 0)
    for method, path in list_routes():
        if re.fullmatch(PLAN_ROUTES, path):
            continue
        needs = "read" if method == "GET" else "submit" if re.fullmatch(SUBMIT_ROUTES, path) else "operate"
        num_routes[needs] += 1
        address = re.sub(r"{\w+}", "1", path)
        refused = others[needs].generic(method, address, "{}", content_type="application/json")
        assert refused.status_code == 403, (method, path, refused.content)
        assert f"with the scope {needs}. The scopes of this token are" in refused.content.decode(), (method, path)
        accepted = clients[needs].generic(method, address, "{}", content_type="application/json")
        assert "with the scope" not in accepted.content.decode(errors="replace"), (method, path)
    assert num_routes["read"] > 20
    assert num_routes["submit"] > 5
    assert num_routes["operate"] > 10


@pytest.mark.parametrize(("scope", "status"), [("read", 200), ("submit", 200), ("operate", 403)])
def test_plan_routes_accept_read_or_submit(owner: User, scope: str, status: int) -> None:
    client = make_client(owner, scope)
    search = {"spec": GOOD, "ranks": 4}
    for path, body in (("plan", GOOD), ("plan/search", search), ("plan/explain", {"spec": GOOD})):
        response = client.post(f"/api/v1/{path}", body, format="json")
        assert response.status_code == status, response.content
        assert (f"POST /api/v1/{path} needs a token with the scope read or submit" in str(response.json())) == (
            status == 403
        )


def test_document_lists_403_for_every_route() -> None:
    """Generated clients need the 403 in the document to parse the response."""
    paths = openapi.get_document()["paths"]
    undocumented = [
        (method, path) for method, path in list_routes() if "403" not in paths[path][method.lower()]["responses"]
    ]
    assert undocumented == []


def test_error_names_the_missing_scope(owner: User, make_job: Callable[..., Job]) -> None:
    job = make_job(owner, "default")
    response = make_client(owner, "read").post(f"/api/v1/jobs/{job.id}/cancel")
    message = (
        f"POST /api/v1/jobs/{job.id}/cancel needs a token with the scope submit. The scopes of this token are: read."
    )
    assert (response.status_code, response.json()["errors"][0]["message"]) == (403, message)


def test_submit_scope_does_not_change_foreign_jobs(
    members: dict[str, User], staff: User, make_job: Callable[..., Job]
) -> None:
    """This is also true if the owner of the token has the right."""
    job = make_job(members["colleague"])
    body = {"action": "tag", "jobs": [job.id], "tags": ["a"]}
    for who in (members["operator"], staff):
        client = make_client(who, "read", "submit")
        assert client.post(f"/api/v1/jobs/{job.id}/cancel").status_code == 403
        assert client.post("/api/v1/jobs/actions", body, format="json").json()["changed"] == []
    assert make_client(members["colleague"], "submit").post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200


def test_session_has_all_scopes(owner: User, make_job: Callable[..., Job], client: Client) -> None:
    job = make_job(owner, "default")
    client.force_login(owner)
    assert client.post(f"/api/v1/jobs/{job.id}/cancel", "", content_type="application/json").status_code == 200


def test_token_is_shown_once_and_stored_as_hash(owner: User, api: Api) -> None:
    client = api(owner)
    longest = client.post("/api/v1/tokens", {"name": "long", "scopes": ["read"], "days": 36500}, format="json").json()
    assert datetime.fromisoformat(longest["expires"]) <= timezone.now() + timedelta(days=90)
    made = client.post("/api/v1/tokens", {"name": "ci", "scopes": ["read", "submit"], "days": 7}, format="json")
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    text = made.json()["token"]
    tokens_page = client.get("/api/v1/tokens").content.decode()
    assert made.json()["key"] in tokens_page
    assert text not in tokens_page
    rows = str([*AuthToken.objects.values(), *TokenGrant.objects.values(), *AuditEntry.objects.values()])
    assert text not in rows
    expires = AuthToken.objects.get(grant__name="ci").expiry
    assert timedelta(days=6.9) < expires - timezone.now() <= timedelta(days=7)


@pytest.mark.parametrize(
    ("days", "lasts", "shortened"), [(91, 90, True), (90, 90, False), (1, 1, False), (None, 90, False)]
)
def test_response_reports_a_shortened_expiry(
    days: int | None, lasts: int, shortened: bool, owner: User, client: Client
) -> None:
    client.force_login(owner)
    body = {"name": "ci", "scopes": ["read"], "days": days}
    made = client.post("/api/v1/tokens", body, content_type="application/json").json()
    left = datetime.fromisoformat(made["expires"]) - timezone.now()
    assert (made["shortened"], timedelta(days=lasts - 0.1) < left <= timedelta(days=lasts)) == (shortened, True)


def test_database_contains_no_secret_that_is_shown_once(staff: User, team: Project, api: Api) -> None:
    client = api(staff)
    shown = {}
    for path, body, field in (
        ("tokens", {"name": "ci", "scopes": ["read"]}, "token"),
        ("join-tokens", {"uses": 1}, "token"),
        ("projects/team/invitations", {"role": "viewer"}, "token"),
        ("projects/team/webhooks", {"name": "chat", "url": "https://chat.example/7"}, "secret"),
        ("runs", {"world_size": 2, "name": "by hand"}, "token"),
    ):
        response = client.post(f"/api/v1/{path}", body, format="json")
        assert response.status_code == 201, response.content
        shown[path] = response.json()[field]
    assert {path: find_tables_with(secret) for path, secret in shown.items()} == {path: [] for path in shown}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"scopes": ["read"]}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["all"]}, "scopes.0"),
        ({"name": "x", "scopes": ["read"], "days": 0}, "days"),
        ({"name": "x\0", "scopes": ["read"]}, "name"),
    ],
)
def test_rejects_an_invalid_token_request_by_field(body: dict[str, Any], field: str, owner: User, api: Api) -> None:
    client = api(owner)
    response = client.post("/api/v1/tokens", body, format="json")
    assert (response.status_code, [error["field"] for error in response.json()["errors"]]) == (422, [field])
    assert AuthToken.objects.count() == 1


def test_token_cannot_create_a_stronger_or_longer_token(owner: User) -> None:
    text = tokens.create_token(owner, ApiTokenRequest(name="short", scopes=["read", "operate"], days=1)).text
    client = APIClient(headers={"Authorization": f"Token {text}"})
    more = client.post("/api/v1/tokens", {"name": "more", "scopes": ["submit"]}, format="json")
    assert (more.status_code, more.json()["errors"][0]["field"]) == (422, "scopes")
    same = client.post("/api/v1/tokens", {"name": "same", "scopes": ["read"], "days": 90}, format="json")
    assert (same.status_code, same.json()["shortened"]) == (201, True)
    assert len(set(AuthToken.objects.values_list("expiry", flat=True))) == 1


def test_records_the_last_use_and_address(owner: User, api: Api) -> None:
    client = make_client(owner, "read")
    assert api(owner).get("/api/v1/tokens").json()[1]["last_used"] is None
    client.get("/api/v1/jobs", REMOTE_ADDR="192.0.2.7")
    row = next(row for row in api(owner).get("/api/v1/tokens").json() if row["name"] == "t")
    assert row["address"] == "192.0.2.7"
    assert row["last_used"] is not None


def test_only_owners_list_and_revoke_tokens(owner: User, stranger: User, staff: User, api: Api) -> None:
    client = make_client(owner, "read", "operate")
    key = client.get("/api/v1/tokens").json()[0]["key"]
    for other in (stranger, staff):
        assert key not in api(other).get("/api/v1/tokens").content.decode()
        assert api(other).delete(f"/api/v1/tokens/{key}").status_code == 404
    assert client.delete(f"/api/v1/tokens/{key}").status_code == 204
    assert client.get("/api/v1/jobs").status_code == 401


def change_on_page(user: User, client: Client) -> None:
    client.force_login(user)
    body = {"old_password": "owner-password", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    assert client.post("/account/password/", body).status_code == 302


def change_in_admin(user: User, client: Client) -> None:
    User.objects.create_superuser("root", password="root-password")
    client.force_login(User.objects.get(username="root"))
    body = {"password1": "quite-another-1", "password2": "quite-another-1", "usable_password": "true"}
    assert client.post(f"/admin/auth/user/{user.pk}/password/", body).status_code == 302


def change_in_code(user: User, _client: Client) -> None:
    saved = User.objects.get(pk=user.pk)
    saved.set_password("quite-another-1")
    saved.save()


@pytest.mark.parametrize("change", [change_on_page, change_in_admin, change_in_code])
def test_new_password_deletes_all_tokens(change: Callable[[User, Client], None], owner: User, client: Client) -> None:
    rest = make_client(owner, "read")
    assert rest.get("/api/v1/jobs").status_code == 200
    change(owner, client)
    assert User.objects.get(pk=owner.pk).check_password("quite-another-1")
    assert rest.get("/api/v1/jobs").status_code == 401
    assert not AuthToken.objects.filter(user=owner).exists()


def test_other_account_changes_keep_tokens(owner: User, settings: Any) -> None:
    client = make_client(owner, "read")
    user = User.objects.get(pk=owner.pk)
    user.email = "new@example.org"
    user.save()
    settings.PASSWORD_HASHERS = [
        "django.contrib.auth.hashers.ScryptPasswordHasher",
        *settings.PASSWORD_HASHERS,
    ]
    assert user.check_password("owner-password"), "the check replaces the old hash"
    assert User.objects.get(pk=owner.pk).password.startswith("scrypt")
    assert client.get("/api/v1/jobs").status_code == 200


def test_demo_token_has_all_scopes(db: None, capsys: Any) -> None:
    call_command("meshboard_user")
    assert set(TokenGrant.objects.get().scopes) == set(SCOPES)


def test_demo_restart_keeps_changed_password_and_tokens(db: None, capsys: Any, tmp_path: Path) -> None:
    rows = tmp_path / "up.json"
    call_command("meshboard_user")
    rows.write_text(capsys.readouterr().out)
    admin = User.objects.get()
    admin.set_password("chosen on the page")
    admin.save()
    own = tokens.create_token(admin, ApiTokenRequest(name="ci", scopes=["read"])).text
    for _ in range(2):  # The token is missing first, because the new password deleted it, and present then.
        call_command("meshboard_user", keep=rows)
        rows.write_text(capsys.readouterr().out)
    assert json.loads(rows.read_text())["password"] == ""
    admin.refresh_from_db()
    assert admin.check_password("chosen on the page")
    assert APIClient(headers={"Authorization": f"Token {own}"}).get("/api/v1/jobs").status_code == 200
    call_command("meshboard_user")  # No file of an earlier start exists.
    assert sorted(TokenGrant.objects.values_list("name", flat=True)) == ["ci", "make up"]


def test_page_creates_shows_once_and_revokes_a_token(owner: User, client: Client) -> None:
    client.force_login(owner)
    made = client.post("/account/tokens/", {"name": "ci <b>", "days": "7", "scopes": ["read"]}, follow=True)
    assert made.redirect_chain == [("/account/tokens/", 302)]
    assert (made.status_code, made.headers["Cache-Control"]) == (200, "no-store")
    text = re.search(r'<pre class="command" id="token">([0-9a-f]+)</pre>', made.content.decode())
    assert text is not None
    rest = APIClient(headers={"Authorization": f"Token {text[1]}"})
    assert rest.get("/api/v1/jobs").status_code == 200
    again = client.get("/account/tokens/")
    assert (again.status_code, again["Location"]) == (302, "/account/")
    assert AuthToken.objects.count() == 1
    page = client.get("/account/").content.decode()
    assert text[1] not in page
    assert "ci &lt;b&gt;" in page
    client.post(f"/account/tokens/{AuthToken.objects.get().token_key}/revoke/")
    assert rest.get("/api/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    ("posted", "message"),
    [
        ({"name": "ci"}, "<code>scopes</code>"),
        ({"name": "ci", "scopes": "read", "days": "x"}, "<code>days</code>"),
        (
            {"name": "ci", "scopes": "read", "days": "-1"},
            "<code>days</code>",
        ),
        (
            {"name": "ci", "scopes": "read", "days": "91"},
            "<code>days</code>",
        ),
        ({"scopes": "read"}, "<code>name</code>"),
    ],
)
def test_page_rejects_an_invalid_token_request(
    posted: dict[str, str], message: str, owner: User, client: Client
) -> None:
    client.force_login(owner)
    assert message in client.post("/account/tokens/", posted, follow=True).content.decode()
    assert not AuthToken.objects.exists()


def test_token_form_address_redirects_to_the_account(owner: User, client: Client) -> None:
    client.force_login(owner)
    response = client.get("/account/tokens/")
    assert (response.status_code, response["Location"]) == (302, "/account/")
    assert 'max="90" value="30"' in client.get("/account/").content.decode()


def test_wrong_old_password_changes_nothing(owner: User, client: Client) -> None:
    rest = make_client(owner, "read")
    client.force_login(owner)
    body = {"old_password": "guess", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    response = client.post("/account/password/", body)
    assert response.status_code == 422
    assert "Your old password was entered incorrectly" in response.content.decode()
    assert rest.get("/api/v1/jobs").status_code == 200
