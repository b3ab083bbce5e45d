"""The second half of 0004: PostgreSQL alters no table whose rows the same transaction has just changed."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("jobs", "0004_slots_of_attempts")]

    operations = [
        migrations.RemoveConstraint("slotallocation", "one_job_per_slot"),
        migrations.RemoveField("slotallocation", "job"),
        migrations.AlterField(
            "slotallocation", "attempt",
            models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.attempt"
            ),
        ),
        migrations.AddConstraint(
            "slotallocation", models.UniqueConstraint(fields=("host", "slot"), name="one_attempt_per_slot")
        ),
        migrations.AddIndex("job", models.Index(fields=["-created"], name="job_newest")),
        migrations.AddIndex("job", models.Index(fields=["owner", "-created"], name="job_newest_of_owner")),
        migrations.AddIndex("job", models.Index(fields=["status", "-priority", "created"], name="job_queue")),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("entry", models.CharField(help_text="its id in the events stream", max_length=50)),
                (
                    "sender",
                    models.CharField(
                        blank=True, help_text="the host it named, as far as it could be read", max_length=100
                    ),
                ),
                ("reason", models.CharField(max_length=1000)),
                ("body", models.TextField(help_text="the message as text, cut at 4,000 characters")),
                ("num_bytes", models.PositiveBigIntegerField()),
                ("created", models.DateTimeField(auto_now_add=True)),
            ],
            options={"ordering": ["-id"]},
        ),
    ]
