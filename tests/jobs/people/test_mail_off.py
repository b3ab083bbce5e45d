"""Pages of people on a board with and without a mail server."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from jobs.models import Project


@pytest.mark.parametrize("host", ["", "mail.example.com"])
def test_fields_of_emails_appear_only_with_a_mail_server(client: Client, db: None, settings: Any, host: str) -> None:
    settings.EMAIL_HOST = host
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    Project.objects.create(name="team")
    account = client.get("/account/").content.decode()
    project = client.get("/projects/team/").content.decode()
    assert ("Email address" in account) == ("invite-email" in project) == bool(host)
    assert "Create invitation" in project
