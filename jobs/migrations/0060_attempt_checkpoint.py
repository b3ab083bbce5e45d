from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0050_engine_told")]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="checkpoint",
            field=models.CharField(
                blank=True,
                default="",
                editable=False,
                help_text="the newest that it told of: a retry goes on",
                max_length=100,
            ),
        ),
    ]
