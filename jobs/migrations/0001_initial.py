"""Create the database of version 0.2.0: tables, the project `default`, and the triggers of the audit log."""

import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import jobs.models.jobs
import jobs.models.notifications
import jobs.models.people
import jobs.models.policy
import jobs.models.runs
import jobs.models.validators

AUDIT_TRIGGERS = {
    "postgresql": [
        """CREATE FUNCTION jobs_audit_stays() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN RAISE EXCEPTION 'audit entries are not changed'; END $$""",
        """CREATE TRIGGER jobs_audit_stays BEFORE UPDATE OR DELETE ON jobs_auditentry
           FOR EACH ROW EXECUTE FUNCTION jobs_audit_stays()""",
        """CREATE TRIGGER jobs_audit_stays_whole BEFORE TRUNCATE ON jobs_auditentry
           FOR EACH STATEMENT EXECUTE FUNCTION jobs_audit_stays()""",
    ],
    "sqlite": [
        """CREATE TRIGGER jobs_audit_is_not_changed BEFORE UPDATE ON jobs_auditentry
           BEGIN SELECT RAISE(ABORT, 'audit entries are not changed'); END""",
        """CREATE TRIGGER jobs_audit_is_not_deleted BEFORE DELETE ON jobs_auditentry
           BEGIN SELECT RAISE(ABORT, 'audit entries are not changed'); END""",
    ],
}


def create_default_project(apps, _schema_editor):
    """Create the project of jobs that name no project."""
    apps.get_model("jobs", "Project").objects.create(name="default")


def protect_audit_log(_apps, schema_editor):
    """Make audit entries read-only. Only `manage.py flush` removes the triggers, for the time of the flush."""
    for statement in AUDIT_TRIGGERS[schema_editor.connection.vendor]:
        schema_editor.execute(statement)


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("knox", "0009_extend_authtoken_field"),  # Its last migration changes the primary key of the tokens.
    ]

    operations = [
        migrations.CreateModel(
            name="Attempt",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "exit",
                    models.JSONField(
                        editable=False,
                        help_text="exit report of the attempt, after the job has ended on all hosts",
                        null=True,
                    ),
                ),
                (
                    "ended",
                    models.DateTimeField(
                        editable=False, help_text="time when the job had ended on all hosts", null=True
                    ),
                ),
                (
                    "checkpoint",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="latest checkpoint of the attempt, from which a retry resumes",
                        max_length=100,
                    ),
                ),
                (
                    "engine_id",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="id of the attempt in its launcher, such as the Slurm job id",
                        max_length=100,
                    ),
                ),
                (
                    "engine_told",
                    models.JSONField(
                        default=dict, editable=False, help_text="last state that the launcher reported, for display"
                    ),
                ),
                (
                    "engine_ended",
                    models.DateTimeField(
                        editable=False, help_text="time when the attempt ended in its launcher", null=True
                    ),
                ),
                (
                    "recorded",
                    models.DateTimeField(
                        editable=False,
                        help_text="time when the recorder had stored the complete history of the attempt",
                        null=True,
                    ),
                ),
                ("diagnosis", models.JSONField(editable=False, help_text="last verdict of the attempt", null=True)),
            ],
        ),
        migrations.CreateModel(
            name="Cursor",
            fields=[
                ("name", models.CharField(max_length=150, primary_key=True, serialize=False)),
                ("position", models.CharField(default="0-0", max_length=50)),
                (
                    "again_to",
                    models.CharField(
                        default="0-0", help_text="entries up to this position may be repetitions", max_length=50
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("entry", models.CharField(help_text="id of the event in the event stream of the host", max_length=50)),
                (
                    "sender",
                    models.CharField(blank=True, help_text="name of the host that sent the event", max_length=100),
                ),
                ("reason", models.CharField(max_length=1000)),
                ("body", models.TextField(help_text="text of the event, truncated to 4,000 characters")),
                ("num_bytes", models.PositiveBigIntegerField()),
                ("created", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="Host",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100, unique=True)),
                ("slots", models.PositiveIntegerField()),
                ("device", models.CharField(max_length=8)),
                ("device_name", models.CharField(max_length=200)),
                ("memory_bytes", models.BigIntegerField(help_text="memory per slot, in bytes")),
                ("boot_id", models.CharField(max_length=200)),
                (
                    "address",
                    models.CharField(
                        blank=True, default="", help_text="address at which other hosts reach this host", max_length=45
                    ),
                ),
                ("last_seen", models.DateTimeField()),
                ("drained", models.BooleanField(default=False, help_text="the host accepts no new jobs")),
                (
                    "labels",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='["a100", "zone=eu"]',
                        validators=[jobs.models.validators.check_labels],
                    ),
                ),
                ("incarnation", models.CharField(default="", editable=False, max_length=200)),
                (
                    "began",
                    models.FloatField(
                        default=0,
                        editable=False,
                        help_text="Unix time at which this process of the host worker started",
                    ),
                ),
                ("sequence", models.BigIntegerField(default=0, editable=False)),
                (
                    "holding",
                    models.JSONField(
                        default=list,
                        editable=False,
                        help_text="slots of running attempts in the last report of the host: [job, attempt, slots]",
                    ),
                ),
                (
                    "note",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="latest warning from the host",
                        max_length=1000,
                    ),
                ),
                (
                    "profile",
                    models.JSONField(editable=False, help_text="result of the last calibration of the host", null=True),
                ),
                ("profiled", models.DateTimeField(editable=False, null=True)),
                (
                    "generation",
                    models.PositiveIntegerField(
                        default=0,
                        editable=False,
                        help_text="number of times that a machine joined under this host name",
                    ),
                ),
                (
                    "identity_hash",
                    models.CharField(
                        default="",
                        editable=False,
                        help_text="SHA-256 hash of the identity that the machine sent when it joined",
                        max_length=64,
                    ),
                ),
                ("joined", models.DateTimeField(editable=False, null=True)),
                (
                    "joined_from",
                    models.CharField(
                        default="",
                        editable=False,
                        help_text="network address of the machine when it joined",
                        max_length=45,
                    ),
                ),
                (
                    "removed",
                    models.DateTimeField(editable=False, help_text="time when staff removed the host", null=True),
                ),
                (
                    "given_up",
                    models.DateTimeField(
                        editable=False, help_text="time when staff last marked the host as lost", null=True
                    ),
                ),
                (
                    "facts",
                    models.JSONField(
                        editable=False,
                        help_text="hardware that the host last reported (contracts.hosts.HostFacts)",
                        null=True,
                    ),
                ),
                (
                    "use",
                    models.JSONField(
                        editable=False,
                        help_text="load that the host last reported (contracts.hosts.HostUsage)",
                        null=True,
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="JoinToken",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("hash", models.CharField(editable=False, help_text="SHA-256", max_length=64, unique=True)),
                ("note", models.CharField(blank=True, default="", help_text="purpose of the token", max_length=200)),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("created_by", models.CharField(editable=False, max_length=150)),
                ("expires", models.DateTimeField()),
                (
                    "most_uses",
                    models.PositiveIntegerField(
                        help_text="maximum number of hosts that can join with the token; empty: unlimited", null=True
                    ),
                ),
                ("uses", models.PositiveIntegerField(default=0, editable=False)),
                ("last_used", models.DateTimeField(editable=False, null=True)),
                ("last_host", models.CharField(blank=True, default="", editable=False, max_length=100)),
                (
                    "labels",
                    models.JSONField(
                        default=list, editable=False, help_text="labels of each host that joins with the token"
                    ),
                ),
                ("revoked", models.DateTimeField(editable=False, null=True)),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("name", models.CharField(max_length=50, primary_key=True, serialize=False)),
                ("holder", models.CharField(blank=True, max_length=200)),
                ("beats", models.BigIntegerField(default=0)),
                (
                    "ticked",
                    models.DateTimeField(help_text="end of the last tick in which every stage succeeded", null=True),
                ),
                ("pruned", models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name="Outbox",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("task", models.CharField(max_length=100)),
                ("queue", models.CharField(max_length=150)),
                ("arguments", models.JSONField()),
                ("created", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="Pool",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "name",
                    models.CharField(
                        max_length=100,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[A-Za-z0-9][A-Za-z0-9._=-]*\\Z",
                                "Use letters, digits, and . _ = -, with a letter or digit first.",
                            )
                        ],
                    ),
                ),
                (
                    "labels",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='["a100", "zone=eu"]',
                        validators=[jobs.models.validators.check_labels],
                    ),
                ),
                ("paused", models.BooleanField(default=False, help_text="hosts of the pool accept no new jobs")),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="Project",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "name",
                    models.CharField(
                        max_length=100,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[A-Za-z0-9][A-Za-z0-9._=-]*\\Z",
                                "Use letters, digits, and . _ = -, with a letter or digit first.",
                            )
                        ],
                    ),
                ),
                (
                    "slots",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="maximum number of slots that jobs of the project use at once; empty: unlimited",
                        null=True,
                    ),
                ),
                (
                    "own_slots",
                    models.PositiveIntegerField(
                        editable=False,
                        help_text="slot limit from the project admins, if it is lower than `slots`",
                        null=True,
                    ),
                ),
                (
                    "weight",
                    models.FloatField(
                        default=1.0,
                        help_text="fair share of the project, relative to a project with weight 1",
                        validators=[
                            django.core.validators.MinValueValidator(0.001),
                            django.core.validators.MaxValueValidator(1000.0),
                        ],
                    ),
                ),
                ("used", models.FloatField(default=0.0, editable=False)),
                (
                    "counted",
                    models.DateTimeField(
                        default=django.utils.timezone.now,
                        editable=False,
                        help_text="time up to which the use of slots was counted",
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="QueueState",
            fields=[
                ("name", models.CharField(default="queue", max_length=20, primary_key=True, serialize=False)),
                (
                    "paused",
                    models.BooleanField(default=False, help_text="no jobs are started while the queue is paused"),
                ),
            ],
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(auto_now_add=True, db_index=True)),
                ("who", models.CharField(help_text="name of the user at that time", max_length=150)),
                ("address", models.CharField(blank=True, help_text="network address of the request", max_length=45)),
                ("what", models.CharField(max_length=50)),
                (
                    "kind",
                    models.CharField(
                        help_text="kind of the changed object: job, host, pool, project, or queue", max_length=20
                    ),
                ),
                ("name", models.CharField(help_text="id or name of the object", max_length=100)),
                ("before", models.JSONField(null=True)),
                ("after", models.JSONField(null=True)),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [models.Index(fields=["kind", "name"], name="audit_of")],
            },
        ),
        migrations.CreateModel(
            name="HostRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "device_name",
                    models.CharField(help_text="device of the host at the time of the run", max_length=200),
                ),
                ("run", models.JSONField()),
                (
                    "attempt",
                    models.OneToOneField(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="measured",
                        to="jobs.attempt",
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name="runs", to="jobs.host"),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="ImportedTrace",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=jobs.models.runs.make_import_id,
                        editable=False,
                        max_length=16,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("name", models.CharField(max_length=100)),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("size", models.BigIntegerField(help_text="total size of the sent files, in bytes")),
                (
                    "files",
                    models.JSONField(
                        default=list, editable=False, help_text="names and sizes of the files: [[name, bytes], ...]"
                    ),
                ),
                ("format", models.CharField(blank=True, default="", editable=False, max_length=32)),
                ("ranks", models.PositiveIntegerField(default=0, editable=False)),
                ("events", models.PositiveIntegerField(default=0, editable=False)),
                ("steps", models.JSONField(default=list, editable=False)),
                (
                    "notes",
                    models.JSONField(default=list, editable=False, help_text="notes about the import, as sentences"),
                ),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="imports", to=settings.AUTH_USER_MODEL
                    ),
                ),
            ],
            options={
                "ordering": ["-created"],
            },
        ),
        migrations.CreateModel(
            name="Job",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=jobs.models.jobs.make_job_id,
                        editable=False,
                        max_length=16,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("name", models.CharField(max_length=100)),
                ("spec", models.JSONField(editable=False)),
                ("kind", models.CharField(editable=False, max_length=16)),
                ("device", models.CharField(editable=False, max_length=8)),
                ("num_slots", models.PositiveIntegerField(editable=False)),
                ("wanted_host", models.CharField(blank=True, default="", editable=False, max_length=100)),
                (
                    "engine",
                    models.CharField(
                        default="hosts",
                        editable=False,
                        help_text="launcher that places and starts the job",
                        max_length=16,
                    ),
                ),
                ("estimate", models.JSONField(editable=False)),
                (
                    "hardware",
                    models.JSONField(
                        editable=False,
                        help_text="cluster for which the job was planned, without corrections from earlier runs",
                        null=True,
                    ),
                ),
                (
                    "chosen",
                    models.JSONField(
                        editable=False,
                        help_text="request and reason of an automatic layout choice; null for other jobs",
                        null=True,
                    ),
                ),
                (
                    "unit",
                    models.PositiveIntegerField(
                        default=1, editable=False, help_text="number of slots that need to be on one host"
                    ),
                ),
                (
                    "wide_unit",
                    models.PositiveIntegerField(
                        default=1, editable=False, help_text="number of slots that are placed on one host if possible"
                    ),
                ),
                (
                    "max_hosts",
                    models.PositiveIntegerField(
                        default=1, editable=False, help_text="maximum number of hosts; 0: any number"
                    ),
                ),
                ("pool", models.CharField(blank=True, default="", editable=False, max_length=100)),
                (
                    "labels",
                    models.JSONField(default=list, editable=False, help_text="labels that the hosts of the job need"),
                ),
                ("project", models.CharField(db_index=True, default="default", editable=False, max_length=100)),
                ("time_limit_s", models.PositiveIntegerField(editable=False, null=True)),
                ("idle_limit_s", models.PositiveIntegerField(editable=False, null=True)),
                ("preemptible", models.BooleanField(default=False, editable=False)),
                (
                    "priority",
                    models.SmallIntegerField(
                        default=0, help_text="queue priority; jobs with a higher priority start first"
                    ),
                ),
                (
                    "moved",
                    models.FloatField(
                        default=0.0, editable=False, help_text="extra points in the queue after staff moved the job"
                    ),
                ),
                (
                    "held",
                    models.BooleanField(
                        default=False, editable=False, help_text="the job does not start until staff release it"
                    ),
                ),
                (
                    "stop",
                    models.CharField(
                        default="",
                        editable=False,
                        help_text="reason why the board ends the current attempt (see queue.termination)",
                        max_length=16,
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("starting", "Starting"),
                            ("running", "Running"),
                            ("unreachable", "Unreachable"),
                            ("cancelling", "Cancelling"),
                            ("succeeded", "Succeeded"),
                            ("failed", "Failed"),
                            ("lost", "Lost"),
                            ("cancelled", "Cancelled"),
                        ],
                        db_index=True,
                        default="queued",
                        editable=False,
                        max_length=16,
                    ),
                ),
                ("attempt", models.PositiveIntegerField(default=1, editable=False)),
                ("wait_reason", models.CharField(blank=True, editable=False, max_length=500)),
                (
                    "archived",
                    models.BooleanField(
                        default=False, editable=False, help_text="the job has ended, and lists hide it by default"
                    ),
                ),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("changed", models.DateTimeField(auto_now=True)),
                (
                    "check_of",
                    models.ForeignKey(
                        editable=False,
                        help_text="original job that this reference check repeats",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="checks",
                        to="jobs.job",
                    ),
                ),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="jobs", to=settings.AUTH_USER_MODEL
                    ),
                ),
            ],
            options={
                "ordering": ["-created"],
            },
        ),
        migrations.CreateModel(
            name="IdempotentRequest",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("key", models.CharField(max_length=200)),
                ("body_hash", models.CharField(max_length=64)),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("user", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
                ("job", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="jobs.job")),
            ],
        ),
        migrations.CreateModel(
            name="EndWish",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="end_wishes",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="end_wishes", to="jobs.job"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Dependency",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "needs",
                    models.CharField(help_text="id of the awaited job, which may have been deleted", max_length=16),
                ),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="dependencies", to="jobs.job"
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="attempt",
            name="job",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="attempts", to="jobs.job"
            ),
        ),
        migrations.CreateModel(
            name="JobTag",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=50)),
                (
                    "job",
                    models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name="tags", to="jobs.job"),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="KeptHost",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("host", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="jobs.host")),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="kept_hosts", to="jobs.job"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Loan",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "attempt",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="loan", to="jobs.attempt"
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="loans", to="jobs.host"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="MailWish",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "project",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="name of the project; empty: own jobs in all projects",
                        max_length=100,
                    ),
                ),
                ("states", models.JSONField(default=list)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="mail_wishes",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Member",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "node",
                    models.PositiveIntegerField(help_text="number of the host within the attempt; rank 0 is on node 0"),
                ),
                ("host_name", models.CharField(max_length=100)),
                ("first_rank", models.PositiveIntegerField()),
                ("num_ranks", models.PositiveIntegerField()),
                ("ordered", models.DateTimeField(help_text="time when the launch order was last sent to the host")),
                (
                    "exit",
                    models.JSONField(
                        editable=False,
                        help_text="exit report of this host, until the attempt has an exit report",
                        null=True,
                    ),
                ),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="outcome on this host (contracts.control.Outcome); lost without a report",
                        max_length=16,
                    ),
                ),
                (
                    "reason",
                    models.CharField(
                        blank=True, default="", editable=False, help_text="reason of the outcome", max_length=1000
                    ),
                ),
                (
                    "ended",
                    models.DateTimeField(
                        editable=False,
                        help_text="time when the attempt ended on this host and released its slots",
                        null=True,
                    ),
                ),
                (
                    "missed",
                    models.PositiveIntegerField(
                        default=0,
                        editable=False,
                        help_text="number of consecutive heartbeats in which the host did not list the attempt",
                    ),
                ),
                ("note", models.CharField(blank=True, default="", editable=False, max_length=1000)),
                (
                    "claim",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        help_text="hash of the secret of the process that reports for this node",
                        max_length=64,
                    ),
                ),
                (
                    "heard",
                    models.DateTimeField(editable=False, help_text="time of the last report from this node", null=True),
                ),
                (
                    "attempt",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="members", to="jobs.attempt"
                    ),
                ),
                (
                    "host",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.PROTECT, related_name="members", to="jobs.host"
                    ),
                ),
            ],
            options={
                "ordering": ["node"],
            },
        ),
        migrations.CreateModel(
            name="Membership",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "role",
                    models.PositiveSmallIntegerField(
                        choices=[(10, "viewer"), (20, "submitter"), (30, "operator"), (40, "admin")]
                    ),
                ),
                ("added", models.DateTimeField(auto_now_add=True)),
                ("added_by", models.CharField(editable=False, max_length=150)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="memberships", to="jobs.project"
                    ),
                ),
            ],
            options={
                "ordering": ["user__username"],
            },
        ),
        migrations.CreateModel(
            name="Invitation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "role",
                    models.PositiveSmallIntegerField(
                        choices=[(10, "viewer"), (20, "submitter"), (30, "operator"), (40, "admin")]
                    ),
                ),
                ("hash", models.CharField(editable=False, help_text="SHA-256", max_length=64, unique=True)),
                (
                    "note",
                    models.CharField(blank=True, default="", help_text="note about the invited person", max_length=200),
                ),
                (
                    "email",
                    models.EmailField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="mail address of the only account that can accept the invitation",
                        max_length=254,
                    ),
                ),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("created_by", models.CharField(editable=False, max_length=150)),
                ("expires", models.DateTimeField()),
                ("accepted", models.DateTimeField(editable=False, null=True)),
                ("accepted_by", models.CharField(blank=True, default="", editable=False, max_length=150)),
                ("revoked", models.DateTimeField(editable=False, null=True)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="invitations", to="jobs.project"
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="ProjectVariable",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                ("sealed", models.TextField(editable=False, help_text="its value, encrypted")),
                ("changed", models.DateTimeField(auto_now=True)),
                ("changed_by", models.CharField(editable=False, max_length=150)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="variables", to="jobs.project"
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="ReportedRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "key",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="key of the run; each node that opens a run with this key gets this run",
                        max_length=200,
                    ),
                ),
                ("tags", models.JSONField(default=list)),
                ("command", models.JSONField(default=list)),
                (
                    "attempt",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="reported", to="jobs.attempt"
                    ),
                ),
                ("owner", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name="Reservation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("starts", models.DateTimeField()),
                ("ends", models.DateTimeField()),
                (
                    "host",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to="jobs.host"
                    ),
                ),
                (
                    "pool",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to="jobs.pool"
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="reservations", to="jobs.project"
                    ),
                ),
            ],
            options={
                "ordering": ["starts"],
            },
        ),
        migrations.CreateModel(
            name="RunToken",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("digest", models.CharField(max_length=64, unique=True)),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "attempt",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="tokens", to="jobs.attempt"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="SlotAllocation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("slot", models.PositiveIntegerField()),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.host"
                    ),
                ),
                (
                    "member",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="allocations", to="jobs.member"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="StateChange",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("attempt", models.PositiveIntegerField()),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("starting", "Starting"),
                            ("running", "Running"),
                            ("unreachable", "Unreachable"),
                            ("cancelling", "Cancelling"),
                            ("succeeded", "Succeeded"),
                            ("failed", "Failed"),
                            ("lost", "Lost"),
                            ("cancelled", "Cancelled"),
                        ],
                        max_length=16,
                    ),
                ),
                ("reason", models.CharField(blank=True, max_length=1000)),
                ("at", models.DateTimeField(auto_now_add=True)),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="history", to="jobs.job"
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="TokenGrant",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                (
                    "scopes",
                    models.JSONField(help_text='["read", "submit"]', validators=[jobs.models.people.check_scopes]),
                ),
                ("last_used", models.DateTimeField(editable=False, null=True)),
                (
                    "address",
                    models.CharField(
                        blank=True, default="", editable=False, help_text="used last from where", max_length=45
                    ),
                ),
                (
                    "token",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="grant", to=settings.KNOX_TOKEN_MODEL
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="Webhook",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=jobs.models.notifications.make_webhook_id,
                        editable=False,
                        max_length=16,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("project", models.CharField(db_index=True, max_length=100)),
                ("name", models.CharField(max_length=100)),
                ("url", models.CharField(max_length=2000)),
                (
                    "states",
                    models.JSONField(
                        default=list, help_text="statuses for which the webhook sends a message; empty: all statuses"
                    ),
                ),
                (
                    "job",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="id of the only job that the webhook reports; empty: all jobs",
                        max_length=16,
                    ),
                ),
                (
                    "everybody",
                    models.BooleanField(
                        default=False, help_text="report all jobs of the project, not only jobs of the webhook owner"
                    ),
                ),
                ("active", models.BooleanField(default=True)),
                (
                    "generation",
                    models.PositiveIntegerField(default=1, editable=False, help_text="number of the current secret"),
                ),
                (
                    "rotated",
                    models.DateTimeField(editable=False, help_text="time when the secret was last replaced", null=True),
                ),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="webhooks",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["created"],
            },
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "key",
                    models.CharField(
                        default=jobs.models.notifications.make_delivery_key, editable=False, max_length=20, unique=True
                    ),
                ),
                ("event", models.CharField(max_length=16)),
                (
                    "job",
                    models.CharField(
                        blank=True, default="", help_text="id of the job, which may have been deleted", max_length=16
                    ),
                ),
                ("body", models.TextField(help_text="exact JSON text that is signed and sent")),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "since",
                    models.DateTimeField(
                        default=django.utils.timezone.now, help_text="time of the first try; retries stop one day later"
                    ),
                ),
                (
                    "due",
                    models.DateTimeField(
                        default=django.utils.timezone.now,
                        help_text="time of the next try; null: no further try",
                        null=True,
                    ),
                ),
                (
                    "outcome",
                    models.CharField(
                        choices=[("waiting", "Waiting"), ("delivered", "Delivered"), ("given up", "Given Up")],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                (
                    "tries",
                    models.JSONField(
                        default=list, help_text="all tries (jobs.people.notifications.payloads.DeliveryTry), newest last"
                    ),
                ),
                (
                    "person",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="mails",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "webhook",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="jobs.webhook",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
        migrations.CreateModel(
            name="BaselineRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("project", models.CharField(max_length=100)),
                ("branch", models.CharField(max_length=200)),
                ("job", models.CharField(help_text="id of the job, which may have been deleted", max_length=16)),
                ("name", models.CharField(help_text="name of the job", max_length=100)),
                ("facts", models.JSONField(help_text="jobs.runs.baselines.Facts")),
                (
                    "spec",
                    models.JSONField(
                        help_text="spec fields that affect the results; null if they are not stored", null=True
                    ),
                ),
                ("by", models.CharField(help_text="name of the user who set the baseline", max_length=150)),
                ("at", models.DateTimeField(auto_now=True, help_text="time when the baseline was set")),
                (
                    "owner",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="baselines",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-at", "-id"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("owner", None)),
                        fields=("project", "branch", "job"),
                        name="one_baseline_per_job",
                    ),
                    models.UniqueConstraint(
                        fields=("owner", "project", "branch", "job"), name="one_baseline_per_owner"
                    ),
                ],
            },
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["-created"], name="job_newest"),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["owner", "-created"], name="job_newest_of_owner"),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["project", "-created"], name="job_newest_of_project"),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["status", "-priority", "created"], name="job_queue"),
        ),
        migrations.AddConstraint(
            model_name="idempotentrequest",
            constraint=models.UniqueConstraint(fields=("user", "key"), name="one_answer_per_key"),
        ),
        migrations.AddConstraint(
            model_name="endwish",
            constraint=models.UniqueConstraint(fields=("job", "user"), name="one_end_wish_per_job"),
        ),
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(
                condition=models.Q(("recorded__isnull", True)), fields=["id"], name="attempts_to_record"
            ),
        ),
        migrations.AddConstraint(
            model_name="attempt",
            constraint=models.UniqueConstraint(fields=("job", "number"), name="one_attempt_per_number"),
        ),
        migrations.AddIndex(
            model_name="jobtag",
            index=models.Index(fields=["name"], name="tag_name"),
        ),
        migrations.AddConstraint(
            model_name="jobtag",
            constraint=models.UniqueConstraint(fields=("job", "name"), name="one_tag_per_name"),
        ),
        migrations.AddIndex(
            model_name="mailwish",
            index=models.Index(fields=["project"], name="wish_of_project"),
        ),
        migrations.AddConstraint(
            model_name="mailwish",
            constraint=models.UniqueConstraint(fields=("user", "project"), name="one_wish_per_project"),
        ),
        migrations.AddConstraint(
            model_name="member",
            constraint=models.UniqueConstraint(fields=("attempt", "node"), name="one_member_per_node"),
        ),
        migrations.AddConstraint(
            model_name="member",
            constraint=models.UniqueConstraint(fields=("attempt", "host_name"), name="one_member_per_host"),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(fields=("project", "user"), name="one_role_per_member"),
        ),
        migrations.AddConstraint(
            model_name="projectvariable",
            constraint=models.UniqueConstraint(fields=("project", "name"), name="one_value_per_variable"),
        ),
        migrations.AddConstraint(
            model_name="reportedrun",
            constraint=models.UniqueConstraint(
                condition=models.Q(("key", ""), _negated=True), fields=("owner", "key"), name="one_run_per_key"
            ),
        ),
        migrations.AddConstraint(
            model_name="reservation",
            constraint=models.CheckConstraint(
                condition=models.Q(("pool__isnull", True), ("host__isnull", True), _connector="XOR"),
                name="reserves_a_pool_or_a_host",
                violation_error_message="Set either a pool or a host for the reservation, not both.",
            ),
        ),
        migrations.AddConstraint(
            model_name="reservation",
            constraint=models.CheckConstraint(
                condition=models.Q(("ends__gt", models.F("starts"))),
                name="reservation_ends_later",
                violation_error_message="The end of the reservation needs to be later than its start.",
            ),
        ),
        migrations.AddConstraint(
            model_name="slotallocation",
            constraint=models.UniqueConstraint(fields=("host", "slot"), name="one_attempt_per_slot"),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(condition=models.Q(("due__isnull", False)), fields=["due"], name="deliveries_due"),
        ),
        migrations.AddIndex(
            model_name="delivery",
            index=models.Index(fields=["webhook", "-id"], name="deliveries_of_webhook"),
        ),
        migrations.AddConstraint(
            model_name="delivery",
            constraint=models.CheckConstraint(
                condition=models.Q(("webhook__isnull", True), ("person__isnull", True), _connector="XOR"),
                name="told_by_one_way",
            ),
        ),
        migrations.RunPython(create_default_project, migrations.RunPython.noop),
        migrations.RunPython(protect_audit_log, migrations.RunPython.noop),
    ]
