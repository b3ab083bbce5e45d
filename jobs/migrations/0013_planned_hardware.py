"""What a job was planned for: its advice must not move with what runs later."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0012_host_runs")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="hardware",
            field=models.JSONField(
                editable=False,
                help_text="the cluster that it was planned for, without the runs that corrected it",
                null=True,
            ),
        ),
    ]
