import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import jobs.models.policy
from django.db import migrations, models


def begin(apps, _schema_editor):
    """The project that jobs belong to unless they name one."""
    apps.get_model("jobs", "Project").objects.create(name="default")


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0015_members_only'),
    ]

    operations = [
        migrations.CreateModel(
            name='Pool',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True, validators=[django.core.validators.RegexValidator('\\A[A-Za-z0-9][A-Za-z0-9._=-]*\\Z', 'letters, digits and . _ = -, a letter or digit first')])),
                ('labels', models.JSONField(blank=True, default=list, help_text='["a100", "zone=eu"]', validators=[jobs.models.policy.checked_labels])),
                ('paused', models.BooleanField(default=False, help_text='its hosts take no new jobs')),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True, validators=[django.core.validators.RegexValidator('\\A[A-Za-z0-9][A-Za-z0-9._=-]*\\Z', 'letters, digits and . _ = -, a letter or digit first')])),
                ('slots', models.PositiveIntegerField(blank=True, help_text='that its jobs may hold at once; empty: any', null=True)),
                ('weight', models.FloatField(default=1.0, help_text='its fair part over that of a project of weight 1', validators=[django.core.validators.MinValueValidator(0.001)])),
                ('used', models.FloatField(default=0.0, editable=False)),
                ('counted', models.DateTimeField(default=django.utils.timezone.now, editable=False, help_text='up to when use was counted')),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='QueueState',
            fields=[
                ('name', models.CharField(default='queue', max_length=20, primary_key=True, serialize=False)),
                ('paused', models.BooleanField(default=False, help_text='nothing is started')),
            ],
        ),
        migrations.AddField(
            model_name='host',
            name='labels',
            field=models.JSONField(blank=True, default=list, help_text='["a100", "zone=eu"]', validators=[jobs.models.policy.checked_labels]),
        ),
        migrations.AddField(
            model_name='job',
            name='held',
            field=models.BooleanField(default=False, editable=False, help_text='does not start until it is released'),
        ),
        migrations.AddField(
            model_name='job',
            name='idle_limit_s',
            field=models.PositiveIntegerField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name='job',
            name='labels',
            field=models.JSONField(default=list, editable=False, help_text='that its hosts have'),
        ),
        migrations.AddField(
            model_name='job',
            name='max_hosts',
            field=models.PositiveIntegerField(default=1, editable=False, help_text='0: any number'),
        ),
        migrations.AddField(
            model_name='job',
            name='moved',
            field=models.FloatField(default=0.0, editable=False, help_text='points that staff gave it by moving it'),
        ),
        migrations.AddField(
            model_name='job',
            name='pool',
            field=models.CharField(blank=True, default='', editable=False, max_length=100),
        ),
        migrations.AddField(
            model_name='job',
            name='preemptible',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='job',
            name='project',
            field=models.CharField(db_index=True, default='default', editable=False, max_length=100),
        ),
        migrations.AddField(
            model_name='job',
            name='stop',
            field=models.CharField(default='', editable=False, help_text='why the board ends the current attempt: see queue.stops', max_length=16),
        ),
        migrations.AddField(
            model_name='job',
            name='time_limit_s',
            field=models.PositiveIntegerField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name='job',
            name='unit',
            field=models.PositiveIntegerField(default=1, editable=False, help_text='slots that must share a host'),
        ),
        migrations.AddField(
            model_name='job',
            name='wide_unit',
            field=models.PositiveIntegerField(default=1, editable=False, help_text='slots that should where they fit'),
        ),
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(auto_now_add=True, db_index=True)),
                ('who', models.CharField(help_text="the user's name then", max_length=150)),
                ('address', models.CharField(blank=True, help_text='where the request came from', max_length=45)),
                ('what', models.CharField(max_length=50)),
                ('kind', models.CharField(help_text='of what it was done to: job, host, pool, project, queue', max_length=20)),
                ('name', models.CharField(help_text='its id or name', max_length=100)),
                ('before', models.JSONField(null=True)),
                ('after', models.JSONField(null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['kind', 'name'], name='audit_of')],
            },
        ),
        migrations.CreateModel(
            name='Dependency',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('needs', models.CharField(help_text="a job's id; the job may have been deleted since", max_length=16)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='dependencies', to='jobs.job')),
            ],
        ),
        migrations.CreateModel(
            name='KeptHost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('host', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='jobs.host')),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='kept_hosts', to='jobs.job')),
            ],
        ),
        migrations.CreateModel(
            name='Reservation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('starts', models.DateTimeField()),
                ('ends', models.DateTimeField()),
                ('host', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to='jobs.host')),
                ('pool', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to='jobs.pool')),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='reservations', to='jobs.project')),
            ],
            options={
                'ordering': ['starts'],
                'constraints': [models.CheckConstraint(condition=models.Q(('pool__isnull', True), ('host__isnull', True), _connector='XOR'), name='reserves_a_pool_or_a_host'), models.CheckConstraint(condition=models.Q(('ends__gt', models.F('starts'))), name='reservation_ends_later')],
            },
        ),
        migrations.RunPython(begin, migrations.RunPython.noop),
    ]
