from django.db import migrations, models

MEASURED = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")


def fill(apps, schema_editor):
    """From the jobs that are still there; what another run ran nobody knows."""
    runs, jobs = (apps.get_model("jobs", name).objects for name in ("BaselineRun", "Job"))
    for run in runs.only("job").iterator():
        spec = jobs.filter(id=run.job).values_list("spec", flat=True).first()
        if spec is not None:
            runs.filter(pk=run.pk).update(spec={name: spec[name] for name in MEASURED if name in spec})


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0100_branch_names'),
    ]

    operations = [
        migrations.AddField(
            model_name='baselinerun',
            name='spec',
            field=models.JSONField(help_text='what the facts hang on, of its spec; null where that was not kept', null=True),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
