from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0002_upload'),
    ]

    operations = [
        migrations.AddField(
            model_name='attempt',
            name='backfilled',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='the attempt uses hosts that are reserved for an earlier job'),
        ),
    ]
