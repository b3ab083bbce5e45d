"""Slots belong to an attempt; heartbeats have an order; what lists and the scheduler ask for has columns."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

TERMINAL = ("succeeded", "failed", "lost", "cancelled")


def fill(apps, schema_editor):
    Job, Attempt = apps.get_model("jobs", "Job"), apps.get_model("jobs", "Attempt")
    for job in Job.objects.iterator():
        layout, resources = job.spec["layout"], job.spec["resources"]
        job.kind = job.spec.get("kind", "train")
        job.device = resources["device"]
        job.wanted_host = resources.get("host") or ""
        ranks = layout["dp"] * layout["pp"] * layout["tp"] * layout.get("cp", 1)
        job.num_slots = 1 if job.kind == "dry_run" else ranks
        job.save(update_fields=["kind", "device", "wanted_host", "num_slots"])
    for attempt in Attempt.objects.select_related("job").iterator():
        if attempt.number < attempt.job.attempt or attempt.job.status in TERMINAL:
            Attempt.objects.filter(pk=attempt.pk).update(ended=attempt.job.changed)


def hand_over(apps, schema_editor):
    """Each slot goes from its job to the job's attempt; one that no attempt holds is free."""
    Attempt, Allocation = apps.get_model("jobs", "Attempt"), apps.get_model("jobs", "SlotAllocation")
    for held in Allocation.objects.select_related("job").iterator():
        attempt = Attempt.objects.filter(job=held.job, number=held.job.attempt, ended__isnull=True).first()
        if attempt is None:
            Allocation.objects.filter(pk=held.pk).delete()
        else:
            Allocation.objects.filter(pk=held.pk).update(attempt=attempt)


class Migration(migrations.Migration):

    dependencies = [
        ("jobs", "0003_forget_old_profiles"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField("host", "incarnation", models.CharField(default="", editable=False, max_length=200)),
        migrations.AddField(
            "host", "began",
            models.FloatField(default=0, editable=False, help_text="when the incarnation started, unix seconds"),
        ),
        migrations.AddField("host", "sequence", models.BigIntegerField(default=0, editable=False)),
        migrations.AddField(
            "host", "holding",
            models.JSONField(
                default=list, editable=False, help_text="slots that it says live attempts hold: [job, attempt, slots]"
            ),
        ),
        migrations.AddField(
            "attempt", "ended",
            models.DateTimeField(
                editable=False, null=True,
                help_text="its host said so, it rebooted, or staff gave it up; until then it holds slots",
            ),
        ),
        migrations.AddField(
            "attempt", "missed",
            models.PositiveIntegerField(
                default=0, editable=False, help_text="heartbeats in a row of its host that did not name it"
            ),
        ),
        migrations.AddField("attempt", "note", models.CharField(blank=True, default="", editable=False, max_length=1000)),
        migrations.AddField("job", "kind", models.CharField(default="train", editable=False, max_length=16), False),
        migrations.AddField("job", "device", models.CharField(default="cpu", editable=False, max_length=8), False),
        migrations.AddField("job", "num_slots", models.PositiveIntegerField(default=1, editable=False), False),
        migrations.AddField(
            "job", "wanted_host", models.CharField(blank=True, default="", editable=False, max_length=100)
        ),
        migrations.AddField(
            "slotallocation", "attempt",
            models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.attempt"
            ),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
        migrations.RunPython(hand_over, migrations.RunPython.noop),
    ]
