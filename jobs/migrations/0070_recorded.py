"""Attempts whose history is whole; those of before there was any, and whose streams are gone, have none to come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import migrations, models
from django.utils import timezone

STREAMS_LAST = timedelta(days=1)


def nothing_to_come(apps: Any, schema_editor: Any) -> None:
    attempts = apps.get_model("jobs", "Attempt").objects
    attempts.filter(ended__lt=timezone.now() - STREAMS_LAST).update(recorded=models.F("ended"))


class Migration(migrations.Migration):
    dependencies = [("jobs", "0062_bounded_weights")]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="recorded",
            field=models.DateTimeField(
                editable=False,
                help_text="when its history was whole; the recorder reads its streams until then",
                null=True,
            ),
        ),
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(
                condition=models.Q(("recorded__isnull", True)), fields=["id"], name="attempts_to_record"
            ),
        ),
        migrations.RunPython(nothing_to_come, migrations.RunPython.noop),
    ]
