"""What runs leave with their host; why a job has the layout that was chosen for it."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0011_host_note")]

    operations = [
        migrations.CreateModel(
            name="HostRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "device_name",
                    models.CharField(
                        help_text="of the host then: what another device did says nothing", max_length=200
                    ),
                ),
                ("run", models.JSONField()),
                (
                    "attempt",
                    models.OneToOneField(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="measured",
                        to="jobs.attempt",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="runs", to="jobs.host"
                    ),
                ),
            ],
            options={"ordering": ["-id"]},
        ),
        migrations.AddField(
            model_name="job",
            name="chosen",
            field=models.JSONField(
                editable=False,
                help_text="where the layout was to be chosen: what was asked, and why this one",
                null=True,
            ),
        ),
    ]
