"""Single sign-on, second factor, and invitations, on wide light and narrow dark screens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value, yield_hotp_counters_from_time
from axe_playwright_python.sync_playwright import Axe
from django.core.management import call_command
from django.test import override_settings
from playwright.sync_api import Browser, ConsoleMessage, Page

from tests.screens.look import faults, grave
from tests.support.browser import open_context
from tests.support.processes import ROOT, run_redis, wait_until
from tests.support.web import Site, run_site

pytestmark = pytest.mark.slow
SCREENS: dict[str, Any] = {
    "wide": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}
INVITED = """
import json, sys, django
django.setup()
from django.contrib.auth.models import User
from jobs.models import Membership, Project, Role
from jobs.people.invitations import InvitationRequest, invite
team = Project.objects.create(name=sys.argv[1])
Membership.objects.create(project=team, user=User.objects.get(username="staff"), role=Role.ADMIN)
wishes = [InvitationRequest(role="submitter", email=email) for email in (f"{sys.argv[1]}@acme.example", None)]
print(json.dumps([invite(team, wish, "staff")[1] for wish in wishes]))
"""
Shoot = Callable[[str], None]


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    from oidc_provider_mock import run_server_in_thread  # a second, which all that collect would take

    with run_server_in_thread() as server:
        yield f"http://localhost:{server.server_port}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, provider: str) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("signing-on")
    with override_settings(STATIC_ROOT=folder / "static"):
        call_command("collectstatic", "--no-input", verbosity=0)
    settings = {
        "MESHBOARD_OIDC_URL": provider,
        "MESHBOARD_OIDC_NAME": "Acme",
        "MESHBOARD_OIDC_CLIENT_ID": "meshboard",
        "MESHBOARD_OIDC_CLIENT_SECRET": "the-board-s-own",
        "MESHBOARD_STATIC_ROOT": str(folder / "static"),
        "MESHBOARD_LOGINS_PER_MINUTE": "1000",
    }
    database = f"sqlite:///{folder}/board.sqlite3"
    with run_redis(folder / "redis") as redis, run_site(database, redis, folder / "web", **settings) as made:
        yield made


@pytest.fixture(params=SCREENS)
def screen(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def page(browser: Browser, served: Site, screen: str) -> Iterator[Page]:
    """Open a page without a login. Its console may contain only refused requests."""
    context = open_context(browser, base_url=served.url, **SCREENS[screen])
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda m: complaints.append(m.text) if _is_ours(opened, m) else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    context.close()
    assert [one for one in complaints if "the server responded with a status of 4" not in one] == []


def _is_ours(page: Page, shown: ConsoleMessage) -> bool:
    """Return whether a message is from the board. The page of the provider requests missing files."""
    return shown.type in ("error", "warning") and page.url.startswith("http://127.0.0.1:")


@pytest.fixture
def shoot(page: Page, tmp_path: Path, screen: str) -> Shoot:
    """Return a function that takes a picture of the page and checks the page for faults."""
    axe = Axe()

    def shot(name: str) -> None:
        page.screenshot(path=tmp_path / f"{name}-{screen}.png", full_page=True)
        assert [*faults(page), *grave(page, axe)] == [], name

    return shot


def log_in(page: Page, name: str, password: str) -> None:
    page.goto("/login/")
    page.fill("#id_username", name)
    page.fill("#id_password", password)
    page.click("main button.primary")


def log_out(page: Page) -> None:
    page.context.clear_cookies()
    page.goto("/login/")


def send(page: Page, words: str) -> None:
    page.get_by_role("button", name=words, exact=True).click()


def heading(page: Page, words: str) -> None:
    page.get_by_role("heading", level=1, name=words).wait_for()


def code_of(secret: str, but: str = "") -> str:
    """Return a current code of an authenticator app. It differs from `but`, because a code works once."""

    def now() -> str:
        found: str = format_hotp_value(hotp_value(secret, next(iter(yield_hotp_counters_from_time()))))
        return "" if found == but else found

    return wait_until(now, "the next half minute begins")


def test_user_logs_in_with_single_sign_on(page: Page, provider: str, shoot: Shoot, screen: str) -> None:
    shown = {"preferred_username": f"ann-{screen}", "email": f"{screen}-ann@acme.example"}
    httpx.put(f"{provider}/users/{screen}", json=shown).raise_for_status()
    page.goto("/login/?next=/account/")
    shoot("login")
    page.get_by_role("link", name="Log in with Acme").click()
    page.get_by_placeholder("sub").fill(screen)
    send(page, "Authorize")
    heading(page, f"ann-{screen}")
    assert page.url.endswith("/account/"), "where they were going"
    page.get_by_text(f"Connected to Acme as ann-{screen} (subject {screen}) since ").wait_for()
    shoot("account-signed-on")
    page.goto("/login/oidc/board/login/callback/?error=access_denied")
    heading(page, "Sign-on failed")
    shoot("not-signed-on")
    page.goto("/login/cancelled/")
    heading(page, "Sign-on canceled")
    shoot("sign-on-cancelled")
    page.goto("/login/closed/")
    heading(page, "Account disabled")
    shoot("account-closed")


@pytest.mark.extended
def test_local_account_connects_to_single_sign_on(page: Page, provider: str, shoot: Shoot, screen: str) -> None:
    who = {"wide": "stranger", "narrow": "viewer"}[screen]
    called = who + "-of-a-very-long-name" * 5
    httpx.put(f"{provider}/users/{who}-at-acme", json={"preferred_username": called}).raise_for_status()
    log_in(page, who, f"{who}-password")
    page.goto("/account/")
    page.get_by_role("link", name="Connect").click()
    page.get_by_placeholder("sub").fill(f"{who}-at-acme")
    send(page, "Authorize")
    heading(page, "Confirm password")
    page.fill("#id_password", f"{who}-password")
    send(page, "Continue")
    page.get_by_text(f"Connected to Acme as {called}").wait_for()
    shoot("account-connected")
    log_out(page)
    page.get_by_role("link", name="Log in with Acme").click()
    page.get_by_placeholder("sub").fill(f"{who}-at-acme")
    send(page, "Authorize")
    page.wait_for_url("**/")
    page.goto("/account/")
    heading(page, who)
    send(page, "Disconnect")
    heading(page, "Confirm password")
    page.fill("#id_password", f"{who}-password")
    send(page, "Continue")
    page.get_by_text("The single sign-on identity was removed from your account.").wait_for()
    page.get_by_role("link", name="Connect").wait_for()
    shoot("account-disconnected")


def test_second_factor_is_required_after_activation(page: Page, shoot: Shoot, screen: str) -> None:
    who = {"wide": "owner", "narrow": "staff"}[screen]
    log_in(page, who, f"{who}-password")
    page.wait_for_url("**/")
    page.goto("/account/")
    shoot("account")
    page.get_by_role("link", name="Turn on").click()
    heading(page, "Confirm password")
    shoot("is-it-you")
    page.fill("#id_password", f"{who}-password")
    send(page, "Continue")
    heading(page, "Second factor")
    assert page.locator("img.qr").evaluate("image => image.complete && image.naturalWidth > 0"), "the policy lets it"
    shoot("second-factor-on")
    page.fill("#id_code", "000000")
    send(page, "Turn on")
    page.get_by_text("Incorrect code").wait_for()
    shoot("second-factor-on-wrong")
    secret = page.locator("main code").inner_text()
    first = code_of(secret)
    page.fill("#id_code", first)
    send(page, "Turn on")
    heading(page, "Recovery codes")
    shoot("recovery-codes")
    codes = page.locator("pre.command").inner_text().split()
    assert len(codes) == 10
    log_out(page)
    log_in(page, who, f"{who}-password")
    heading(page, "Second factor")
    page.fill("#id_code", "123456")
    send(page, "Log in")
    page.get_by_text("Incorrect code").wait_for()
    shoot("second-factor-asked")
    page.fill("#id_code", code_of(secret, but=first))
    send(page, "Log in")
    page.wait_for_url("**/")
    page.goto("/account/")
    page.get_by_text("The second factor is on.").wait_for()
    shoot("account-second-factor")


def test_invitation_creates_an_account_or_adds_a_member(page: Page, served: Site, shoot: Shoot, screen: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INVITED, f"team-{screen}"],
        env=served.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    new, old = (f"/invitations/?token={text}" for text in json.loads(ran.stdout))
    page.goto(new)
    heading(page, f"Join team-{screen}?")
    shoot("invitation")
    page.fill("#id_username", "owner")
    page.fill("#id_password1", "short")
    page.fill("#id_password2", "shorter")
    send(page, "Create account and join")
    page.get_by_text("already exists").wait_for()
    shoot("invitation-refused")
    page.fill("#id_username", f"bob-{screen}")
    for field in ("#id_password1", "#id_password2"):
        page.fill(field, "quite-a-secret-1")
    send(page, "Create account and join")
    heading(page, f"team-{screen}")
    page.get_by_text(f"You joined project team-{screen} with the role submitter.").wait_for()
    shoot("joined")
    log_out(page)
    page.goto(new)
    heading(page, "Invitation not valid")
    shoot("invitation-used")
    page.goto(old)
    page.get_by_role("link", name="Log in instead").click()
    who = {"wide": "stranger", "narrow": "viewer"}[screen]
    page.fill("#id_username", who)
    page.fill("#id_password", f"{who}-password")
    page.click("main button.primary")
    heading(page, f"Join team-{screen}?")
    shoot("invitation-logged-in")
    send(page, "Join")
    heading(page, f"team-{screen}")
    page.get_by_text(f"You joined project team-{screen} with the role submitter.").wait_for()
