from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("jobs", "0040_reported_runs"),
    ]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="engine_told",
            field=models.JSONField(
                default=dict, editable=False, help_text="what the engine said of it last, for people: words by what they tell"
            ),
        ),
        migrations.AddField(
            model_name="attempt",
            name="engine_ended",
            field=models.DateTimeField(
                editable=False, help_text="when the engine had nothing left of it; hosts tell that by member", null=True
            ),
        ),
    ]
