"""An attempt may lie on several hosts: what was of its one host is of a member."""

import django.db.models.deletion
from django.db import migrations, models

CHUNK = 500


def outcome(attempt):
    if attempt.ended is None:
        return {}
    told = attempt.exit or {"outcome": "lost", "reason": ""}
    return {"outcome": told["outcome"], "reason": told["reason"][:1000]}


def fill(apps, schema_editor):
    Attempt, Member = apps.get_model("jobs", "Attempt"), apps.get_model("jobs", "Member")
    drafts = []
    for attempt in Attempt.objects.select_related("host", "job").defer("job__spec", "job__estimate").iterator():
        drafts.append(
            Member(
                attempt=attempt, node=0, host=attempt.host, host_name=attempt.host.name, first_rank=0,
                num_ranks=attempt.job.num_slots, ordered=attempt.ordered, ended=attempt.ended,
                missed=attempt.missed, note=attempt.note, **outcome(attempt),
            )
        )
        if len(drafts) == CHUNK:
            Member.objects.bulk_create(drafts)
            drafts = []
    Member.objects.bulk_create(drafts)
    of_attempt = Member.objects.filter(attempt=models.OuterRef("attempt")).values("pk")[:1]
    apps.get_model("jobs", "SlotAllocation").objects.update(member=models.Subquery(of_attempt))


class Migration(migrations.Migration):
    dependencies = [("jobs", "0013_planned_hardware")]

    operations = [
        migrations.AddField(
            "job", "engine",
            models.CharField(default="hosts", editable=False, help_text="who places and starts it", max_length=16),
        ),
        migrations.AddField(
            "host", "address",
            models.CharField(blank=True, default="", help_text="where other hosts reach it", max_length=45),
        ),
        migrations.AddField(
            "attempt", "engine_id",
            models.CharField(
                blank=True, default="", editable=False, max_length=100,
                help_text="what the engine calls it: Slurm's job id",
            ),
        ),
        migrations.CreateModel(
            name="Member",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("node", models.PositiveIntegerField(help_text="its place in the gang; rank 0 is on node 0")),
                ("host_name", models.CharField(max_length=100)),
                ("first_rank", models.PositiveIntegerField()),
                ("num_ranks", models.PositiveIntegerField()),
                ("ordered", models.DateTimeField(help_text="when the launch order was last sent")),
                (
                    "exit",
                    models.JSONField(
                        editable=False, help_text="what its supervisor told, until the gang's is made", null=True
                    ),
                ),
                (
                    "outcome",
                    models.CharField(
                        blank=True, default="", editable=False, max_length=16,
                        help_text="contracts.control.Outcome; lost: never told",
                    ),
                ),
                (
                    "reason",
                    models.CharField(
                        blank=True, default="", editable=False, help_text="of its outcome", max_length=1000
                    ),
                ),
                (
                    "ended",
                    models.DateTimeField(
                        editable=False, null=True,
                        help_text="its host said so, it rebooted, or staff gave it up; until then it holds slots",
                    ),
                ),
                (
                    "missed",
                    models.PositiveIntegerField(
                        default=0, editable=False, help_text="heartbeats in a row of its host that did not name it"
                    ),
                ),
                ("note", models.CharField(blank=True, default="", editable=False, max_length=1000)),
                (
                    "attempt",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="members", to="jobs.attempt"
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.PROTECT, related_name="members", to="jobs.host"
                    ),
                ),
            ],
            options={"ordering": ["node"]},
        ),
        migrations.AddField(
            "slotallocation", "member",
            models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.member"
            ),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
