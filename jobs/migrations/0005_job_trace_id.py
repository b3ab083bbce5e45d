from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0004_host_health'),
    ]

    operations = [
        migrations.AddField(
            model_name='job',
            name='trace_id',
            field=models.CharField(db_default='', default='', editable=False, help_text='W3C trace ID of the request that submitted the job', max_length=32),
        ),
    ]
