"""REST tokens: what each may be used for on every route, who sees what of them, and when they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
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
from tests.jobs.people.plaintext import tables_that_tell
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
SCOPES = ("read", "submit", "operate")
# Each route of the document that writes and needs no more than `submit`; every other one that writes needs `operate`.
SUBMITS = r"/api/v1/(jobs|runs|lab|imports)(/.*)?"
ASKS = r"/api/v1/plan(/.*)?"  # changes nothing, whatever its method
OWN_DOOR = ("/api/v1/hosts/join", "/api/v1/runs/{run}/{attempt}/members")  # come with another kind of token


def with_scopes(user: User, *scopes: str) -> APIClient:
    text = tokens.create_token(user, ApiTokenRequest.model_validate({"name": "t", "scopes": [*scopes]})).text
    return APIClient(headers={"Authorization": f"Token {text}"})


def routes() -> list[tuple[str, str]]:
    return sorted(
        (method.upper(), path)
        for path, item in openapi.get_document()["paths"].items()
        for method in item
        if not path.startswith(OWN_DOOR)
    )


def test_every_route_of_the_document_asks_for_its_scope(staff: User) -> None:
    """With every scope but the one that is needed it is refused, with that one alone it is not."""
    clients = {scope: with_scopes(staff, scope) for scope in SCOPES}
    others = {scope: with_scopes(staff, *(other for other in SCOPES if other != scope)) for scope in SCOPES}
    walked = dict.fromkeys(SCOPES, 0)
    for method, path in routes():
        if re.fullmatch(ASKS, path):
            continue
        needs = "read" if method == "GET" else "submit" if re.fullmatch(SUBMITS, path) else "operate"
        walked[needs] += 1
        address = re.sub(r"{\w+}", "1", path)
        refused = others[needs].generic(method, address, "{}", content_type="application/json")
        assert refused.status_code == 403, (method, path, refused.content)
        assert f"with the scope {needs}. The scopes of this token are" in refused.content.decode(), (method, path)
        let_in = clients[needs].generic(method, address, "{}", content_type="application/json")
        assert "with the scope" not in let_in.content.decode(errors="replace"), (method, path)
    assert walked["read"] > 20
    assert walked["submit"] > 5
    assert walked["operate"] > 10


@pytest.mark.parametrize(("scope", "status"), [("read", 200), ("submit", 200), ("operate", 403)])
def test_a_plan_is_read_and_asked_for_before_a_submit(owner: User, scope: str, status: int) -> None:
    rest = with_scopes(owner, scope)
    search = {"spec": GOOD, "ranks": 4}
    for path, body in (("plan", GOOD), ("plan/search", search), ("plan/explain", {"spec": GOOD})):
        answer = rest.post(f"/api/v1/{path}", body, format="json")
        assert answer.status_code == status, answer.content
        assert (f"POST /api/v1/{path} needs a token with the scope read or submit" in str(answer.json())) == (
            status == 403
        )


def test_the_document_says_of_each_route_that_a_scope_may_lack() -> None:
    """So did 35 that only read, of which it listed no 403: a client made of it could not understand the answer."""
    paths = openapi.get_document()["paths"]
    silent = [(method, path) for method, path in routes() if "403" not in paths[path][method.lower()]["responses"]]
    assert silent == []


def test_a_token_says_which_scope_it_lacks(owner: User, make_job: Callable[..., Job]) -> None:
    job = make_job(owner, "default")
    answer = with_scopes(owner, "read").post(f"/api/v1/jobs/{job.id}/cancel")
    words = (
        f"POST /api/v1/jobs/{job.id}/cancel needs a token with the scope submit. The scopes of this token are: read."
    )
    assert (answer.status_code, answer.json()["errors"][0]["message"]) == (403, words)


def test_a_token_to_submit_changes_nothing_of_others(
    members: dict[str, User], staff: User, make_job: Callable[..., Job]
) -> None:
    """Also where its owner may."""
    job = make_job(members["colleague"])
    asked = {"action": "tag", "jobs": [job.id], "tags": ["a"]}
    for who in (members["operator"], staff):
        rest = with_scopes(who, "read", "submit")
        assert rest.post(f"/api/v1/jobs/{job.id}/cancel").status_code == 403
        assert rest.post("/api/v1/jobs/actions", asked, format="json").json()["changed"] == []
    assert with_scopes(members["colleague"], "submit").post(f"/api/v1/jobs/{job.id}/cancel").status_code == 200


def test_a_session_may_all(owner: User, make_job: Callable[..., Job], client: Client) -> None:
    job = make_job(owner, "default")
    client.force_login(owner)
    assert client.post(f"/api/v1/jobs/{job.id}/cancel", "", content_type="application/json").status_code == 200


def test_a_token_is_shown_once_and_kept_as_a_hash(owner: User, api: Api) -> None:
    rest = api(owner)
    longest = rest.post("/api/v1/tokens", {"name": "long", "scopes": ["read"], "days": 36500}, format="json").json()
    assert datetime.fromisoformat(longest["expires"]) <= timezone.now() + timedelta(days=90)
    made = rest.post("/api/v1/tokens", {"name": "ci", "scopes": ["read", "submit"], "days": 7}, format="json")
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    text = made.json()["token"]
    listed = rest.get("/api/v1/tokens").content.decode()
    assert made.json()["key"] in listed
    assert text not in listed
    kept = str([*AuthToken.objects.values(), *TokenGrant.objects.values(), *AuditEntry.objects.values()])
    assert text not in kept
    expires = AuthToken.objects.get(grant__name="ci").expiry
    assert timedelta(days=6.9) < expires - timezone.now() <= timedelta(days=7)


@pytest.mark.parametrize(
    ("days", "lasts", "shortened"), [(91, 90, True), (90, 90, False), (1, 1, False), (None, 90, False)]
)
def test_an_answer_tells_of_days_that_were_cut(
    days: int | None, lasts: int, shortened: bool, owner: User, client: Client
) -> None:
    client.force_login(owner)
    wish = {"name": "ci", "scopes": ["read"], "days": days}
    made = client.post("/api/v1/tokens", wish, content_type="application/json").json()
    left = datetime.fromisoformat(made["expires"]) - timezone.now()
    assert (made["shortened"], timedelta(days=lasts - 0.1) < left <= timedelta(days=lasts)) == (shortened, True)


def test_nothing_that_is_shown_once_can_be_read_in_the_database(staff: User, team: Project, api: Api) -> None:
    rest = api(staff)
    shown = {}
    for path, wish, field in (
        ("tokens", {"name": "ci", "scopes": ["read"]}, "token"),
        ("join-tokens", {"uses": 1}, "token"),
        ("projects/team/invitations", {"role": "viewer"}, "token"),
        ("projects/team/webhooks", {"name": "chat", "url": "https://chat.example/7"}, "secret"),
        ("runs", {"world_size": 2, "name": "by hand"}, "token"),
    ):
        answer = rest.post(f"/api/v1/{path}", wish, format="json")
        assert answer.status_code == 201, answer.content
        shown[path] = answer.json()[field]
    assert {path: tables_that_tell(secret) for path, secret in shown.items()} == {path: [] for path in shown}


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"scopes": ["read"]}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["all"]}, "scopes.0"),
        ({"name": "x", "scopes": ["read"], "days": 0}, "days"),
        ({"name": "x\0", "scopes": ["read"]}, "name"),
    ],
)
def test_a_senseless_wish_names_its_field(wish: dict[str, Any], field: str, owner: User, api: Api) -> None:
    rest = api(owner)
    answer = rest.post("/api/v1/tokens", wish, format="json")
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field])
    assert AuthToken.objects.count() == 1


def test_a_token_makes_none_that_may_more_or_lasts_longer(owner: User) -> None:
    text = tokens.create_token(owner, ApiTokenRequest(name="short", scopes=["read", "operate"], days=1)).text
    rest = APIClient(headers={"Authorization": f"Token {text}"})
    more = rest.post("/api/v1/tokens", {"name": "more", "scopes": ["submit"]}, format="json")
    assert (more.status_code, more.json()["errors"][0]["field"]) == (422, "scopes")
    same = rest.post("/api/v1/tokens", {"name": "same", "scopes": ["read"], "days": 90}, format="json")
    assert (same.status_code, same.json()["shortened"]) == (201, True)
    assert len(set(AuthToken.objects.values_list("expiry", flat=True))) == 1


def test_use_is_noted_with_its_address(owner: User, api: Api) -> None:
    rest = with_scopes(owner, "read")
    assert api(owner).get("/api/v1/tokens").json()[1]["last_used"] is None
    rest.get("/api/v1/jobs", REMOTE_ADDR="192.0.2.7")
    told = next(row for row in api(owner).get("/api/v1/tokens").json() if row["name"] == "t")
    assert told["address"] == "192.0.2.7"
    assert told["last_used"] is not None


def test_only_its_owner_lists_and_revokes_a_token(owner: User, stranger: User, staff: User, api: Api) -> None:
    rest = with_scopes(owner, "read", "operate")
    key = rest.get("/api/v1/tokens").json()[0]["key"]
    for other in (stranger, staff):
        assert key not in api(other).get("/api/v1/tokens").content.decode()
        assert api(other).delete(f"/api/v1/tokens/{key}").status_code == 404
    assert rest.delete(f"/api/v1/tokens/{key}").status_code == 204
    assert rest.get("/api/v1/jobs").status_code == 401


def by_page(user: User, client: Client) -> None:
    client.force_login(user)
    asked = {"old_password": "owner-password", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    assert client.post("/account/password/", asked).status_code == 302


def by_admin(user: User, client: Client) -> None:
    User.objects.create_superuser("root", password="root-password")
    client.force_login(User.objects.get(username="root"))
    asked = {"password1": "quite-another-1", "password2": "quite-another-1", "usable_password": "true"}
    assert client.post(f"/admin/auth/user/{user.pk}/password/", asked).status_code == 302


def by_code(user: User, _client: Client) -> None:
    fresh = User.objects.get(pk=user.pk)
    fresh.set_password("quite-another-1")
    fresh.save()


@pytest.mark.parametrize("change", [by_page, by_admin, by_code])
def test_a_new_password_ends_every_token(change: Callable[[User, Client], None], owner: User, client: Client) -> None:
    rest = with_scopes(owner, "read")
    assert rest.get("/api/v1/jobs").status_code == 200
    change(owner, client)
    assert User.objects.get(pk=owner.pk).check_password("quite-another-1")
    assert rest.get("/api/v1/jobs").status_code == 401
    assert not AuthToken.objects.filter(user=owner).exists()


def test_other_changes_of_a_person_end_none(owner: User, settings: Any) -> None:
    rest = with_scopes(owner, "read")
    fresh = User.objects.get(pk=owner.pk)
    fresh.email = "new@example.org"
    fresh.save()
    settings.PASSWORD_HASHERS = [
        "django.contrib.auth.hashers.ScryptPasswordHasher",
        *settings.PASSWORD_HASHERS,
    ]
    assert fresh.check_password("owner-password"), "and hashes it anew"
    assert User.objects.get(pk=owner.pk).password.startswith("scrypt")
    assert rest.get("/api/v1/jobs").status_code == 200


def test_the_local_demo_s_token_has_every_scope(db: None, capsys: Any) -> None:
    call_command("meshboard_user")
    assert set(TokenGrant.objects.get().scopes) == set(SCOPES)


def test_another_start_of_the_local_demo_keeps_the_password_that_its_admin_chose_and_all_other_tokens(
    db: None, capsys: Any, tmp_path: Path
) -> None:
    kept = tmp_path / "up.json"
    call_command("meshboard_user")
    kept.write_text(capsys.readouterr().out)
    admin = User.objects.get()
    admin.set_password("chosen on the page")
    admin.save()
    own = tokens.create_token(admin, ApiTokenRequest(name="ci", scopes=["read"])).text
    for _ in range(2):  # the token of the start before is gone, as changing the password does; then it is there
        call_command("meshboard_user", keep=kept)
        kept.write_text(capsys.readouterr().out)
    assert json.loads(kept.read_text())["password"] == ""
    admin.refresh_from_db()
    assert admin.check_password("chosen on the page")
    assert APIClient(headers={"Authorization": f"Token {own}"}).get("/api/v1/jobs").status_code == 200
    call_command("meshboard_user")  # nothing is known of an earlier start
    assert sorted(TokenGrant.objects.values_list("name", flat=True)) == ["ci", "make up"]


def test_the_page_makes_one_shows_it_once_and_revokes_it(owner: User, client: Client) -> None:
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
    ("posted", "words"),
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
def test_the_page_refuses_a_senseless_one_in_words(
    posted: dict[str, str], words: str, owner: User, client: Client
) -> None:
    client.force_login(owner)
    assert words in client.post("/account/tokens/", posted, follow=True).content.decode()
    assert not AuthToken.objects.exists()


def test_the_address_that_makes_tokens_leads_to_the_account(owner: User, client: Client) -> None:
    client.force_login(owner)
    answer = client.get("/account/tokens/")
    assert (answer.status_code, answer["Location"]) == (302, "/account/")
    assert 'max="90" value="30"' in client.get("/account/").content.decode()


def test_a_wrong_password_changes_nothing(owner: User, client: Client) -> None:
    rest = with_scopes(owner, "read")
    client.force_login(owner)
    asked = {"old_password": "guess", "new_password1": "quite-another-1", "new_password2": "quite-another-1"}
    answer = client.post("/account/password/", asked)
    assert answer.status_code == 422
    assert "Your old password was entered incorrectly" in answer.content.decode()
    assert rest.get("/api/v1/jobs").status_code == 200
