"""A lease for the controller; a boot id may be as long as hosts may tell it."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("jobs", "0005_slots_of_attempts_only")]

    operations = [
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("name", models.CharField(max_length=50, primary_key=True, serialize=False)),
                ("holder", models.CharField(blank=True, max_length=200)),
                ("beats", models.BigIntegerField(default=0)),
                (
                    "ticked",
                    models.DateTimeField(help_text="end of the last tick of which every stage went well", null=True),
                ),
                ("pruned", models.DateTimeField(null=True)),
            ],
        ),
        migrations.AlterField("host", "boot_id", models.CharField(max_length=200)),
    ]
