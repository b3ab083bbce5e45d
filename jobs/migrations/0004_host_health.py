from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0003_attempt_backfilled'),
    ]

    operations = [
        migrations.AddField(
            model_name='host',
            name='problem',
            field=models.CharField(db_default='', default='', editable=False, help_text='why the last health check of the host failed', max_length=1000),
        ),
        migrations.AddField(
            model_name='host',
            name='num_faults',
            field=models.PositiveIntegerField(db_default=0, default=0, editable=False, help_text='number of launches in a row that failed because of the host'),
        ),
        migrations.AddField(
            model_name='host',
            name='closed_until',
            field=models.DateTimeField(editable=False, help_text='time until which the host starts no jobs, after several such launches', null=True),
        ),
        migrations.AddField(
            model_name='host',
            name='closed_reason',
            field=models.CharField(db_default='', default='', editable=False, help_text='reason of the last fault', max_length=1000),
        ),
    ]
