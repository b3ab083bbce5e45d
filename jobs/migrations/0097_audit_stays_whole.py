from django.db import migrations

MAKE = {
    'postgresql': [
        """CREATE TRIGGER jobs_audit_stays_whole BEFORE TRUNCATE ON jobs_auditentry
           FOR EACH STATEMENT EXECUTE FUNCTION jobs_audit_stays()""",
    ],
    'sqlite': [
        """CREATE TRIGGER jobs_audit_is_not_changed BEFORE UPDATE ON jobs_auditentry
           BEGIN SELECT RAISE(ABORT, 'audit entries are not changed'); END""",
        """CREATE TRIGGER jobs_audit_is_not_deleted BEFORE DELETE ON jobs_auditentry
           BEGIN SELECT RAISE(ABORT, 'audit entries are not changed'); END""",
    ],
}
DROP = {
    'postgresql': ['DROP TRIGGER jobs_audit_stays_whole ON jobs_auditentry'],
    'sqlite': ['DROP TRIGGER jobs_audit_is_not_changed', 'DROP TRIGGER jobs_audit_is_not_deleted'],
}


def run(statements):
    """`manage.py flush` alone takes them away for its time (`jobs/management/commands/flush.py`)."""

    def change(_apps, schema_editor):
        for statement in statements[schema_editor.connection.vendor]:
            schema_editor.execute(statement)

    return change


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0096_nothing_foretold'),
    ]

    operations = [migrations.RunPython(run(MAKE), run(DROP))]
