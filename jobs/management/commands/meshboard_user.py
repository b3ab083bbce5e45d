"""Create the user of a local demo at first use, and a one-time login link. Prints JSON."""

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

from jobs.people.tokens import ApiTokenRequest, create_token, revoke_token

USERNAME = "admin"
MAKE_UP = "make up"


class Command(BaseCommand):
    """Deployments use `createsuperuser` instead."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--keep", type=Path, help="JSON output of an earlier run, to keep the password and token of that run"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        user, is_new = get_user_model().objects.get_or_create(
            username=USERNAME, defaults={"is_staff": True, "is_superuser": True}
        )
        stored = json.loads(options["keep"].read_text()) if options["keep"] and not is_new else {}
        password, token = stored.get("password"), stored.get("api_token")
        if not user.password:  # a new user
            password = secrets.token_urlsafe(15)
            user.set_password(password)
            user.save()
        elif not password or not user.check_password(password):
            password = ""  # changed by the user
        if not token or not _renew_token(user, token):
            for old in AuthToken.objects.filter(user=user, grant__name=MAKE_UP):
                revoke_token(user, old.token_key)
            token = create_token(user, ApiTokenRequest(name=MAKE_UP, scopes=["read", "submit", "operate"])).text
        once = reverse("login-once") + get_query_string(user)
        result = {"username": USERNAME, "password": password, "api_token": token, "one_time_url_path": once}
        self.stdout.write(json.dumps(result))


def _renew_token(user: Any, token: str) -> bool:
    """Extend the lifetime of the token. Return whether it exists."""
    own = AuthToken.objects.filter(user=user, token_key=token[: CONSTANTS.TOKEN_KEY_LENGTH])
    return bool(own.update(expiry=timezone.now() + knox_settings.TOKEN_TTL) == 1)
