"""The columns that members took over go. In a migration of its own: PostgreSQL alters no table with pending triggers."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0014_members")]

    operations = [
        migrations.RemoveField("slotallocation", "attempt"),
        migrations.AlterField(
            "slotallocation", "member",
            models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.member"
            ),
        ),
        migrations.AddConstraint(
            "member", models.UniqueConstraint(fields=["attempt", "node"], name="one_member_per_node")
        ),
        migrations.AddConstraint(
            "member", models.UniqueConstraint(fields=["attempt", "host_name"], name="one_member_per_host")
        ),
        migrations.RemoveField("attempt", "host"),
        migrations.RemoveField("attempt", "ordered"),
        migrations.RemoveField("attempt", "missed"),
        migrations.RemoveField("attempt", "note"),
        migrations.AlterField(
            "attempt", "exit",
            models.JSONField(
                editable=False, help_text="of the whole gang, once all its members have ended", null=True
            ),
        ),
        migrations.AlterField(
            "attempt", "ended",
            models.DateTimeField(editable=False, help_text="when the last of its members had", null=True),
        ),
    ]
