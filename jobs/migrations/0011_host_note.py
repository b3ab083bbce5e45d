from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0010_lease"),
    ]

    operations = [
        migrations.AddField(
            model_name="host",
            name="note",
            field=models.CharField(
                blank=True, default="", editable=False, help_text="what it wants known", max_length=1000
            ),
        ),
    ]
