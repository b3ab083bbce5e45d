"""The local demo's user: made on first use, with a one-time login link each time. Prints JSON."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandParser
from django.urls import reverse
from django.utils import timezone
from knox.models import AuthToken
from knox.settings import CONSTANTS, knox_settings
from sesame.utils import get_query_string

from jobs.people.tokens import ApiTokenRequest, make, revoke

USERNAME = "admin"
NAME = "make up"  # of its token


class Command(BaseCommand):
    """`make up` runs this; deployments use createsuperuser."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--keep", type=Path, help="JSON output of an earlier run, to keep the password and token of that run"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        user, is_new = get_user_model().objects.get_or_create(
            username=USERNAME, defaults={"is_staff": True, "is_superuser": True}
        )
        kept = json.loads(options["keep"].read_text()) if options["keep"] and not is_new else {}
        password, token = kept.get("password"), kept.get("api_token")
        if not user.password:  # it is new
            password = secrets.token_urlsafe(15)
            user.set_password(password)
            user.save()
        elif not password or not user.check_password(password):
            password = ""  # its own, which nobody else knows
        if not token or not _renewed(user, token):
            for old in AuthToken.objects.filter(user=user, grant__name=NAME):
                revoke(user, old.token_key)
            token = make(user, ApiTokenRequest(name=NAME, scopes=["read", "submit", "operate"])).text
        once = reverse("login-once") + get_query_string(user)
        answer = {"username": USERNAME, "password": password, "api_token": token, "one_time_url_path": once}
        self.stdout.write(json.dumps(answer))


def _renewed(user: Any, token: str) -> bool:
    """Let a token live on from today; False when it is not there any more."""
    own = AuthToken.objects.filter(user=user, token_key=token[: CONSTANTS.TOKEN_KEY_LENGTH])
    return bool(own.update(expiry=timezone.now() + knox_settings.TOKEN_TTL) == 1)
