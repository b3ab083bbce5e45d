from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0062_bounded_weights"),
    ]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="diagnosis",
            field=models.JSONField(editable=False, help_text="jobs.diagnosis.Told, as last looked at", null=True),
        ),
    ]
