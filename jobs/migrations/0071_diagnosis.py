from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0070_recorded"),
    ]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="diagnosis",
            field=models.JSONField(editable=False, help_text="jobs.diagnosis.Told, as last looked at", null=True),
        ),
    ]
