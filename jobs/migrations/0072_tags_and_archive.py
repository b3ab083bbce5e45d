"""Jobs have tags and may be archived; runs from elsewhere keep the tags that they came with."""

from typing import Any

import django.db.models.deletion
from django.db import migrations, models


def tag_reported_runs(apps: Any, _editor: Any) -> None:
    tag = apps.get_model("jobs", "JobTag")
    runs = apps.get_model("jobs", "ReportedRun").objects.exclude(tags=[]).values_list("attempt__job_id", "tags")
    made = (tag(job_id=job, name=name) for job, names in runs.iterator() for name in dict.fromkeys(names))
    tag.objects.bulk_create(made, batch_size=500, ignore_conflicts=True)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0071_diagnosis")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="archived",
            field=models.BooleanField(
                default=False, editable=False, help_text="has ended, and lists leave it out"
            ),
        ),
        migrations.CreateModel(
            name="JobTag",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=50)),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="tags", to="jobs.job"
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
                "indexes": [models.Index(fields=["name"], name="tag_name")],
                "constraints": [models.UniqueConstraint(fields=("job", "name"), name="one_tag_per_name")],
            },
        ),
        migrations.RunPython(tag_reported_runs, migrations.RunPython.noop),
    ]
