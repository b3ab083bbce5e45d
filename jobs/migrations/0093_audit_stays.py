from django.db import migrations

MAKE = """
CREATE FUNCTION jobs_audit_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit entries are not changed';
END $$;
CREATE TRIGGER jobs_audit_stays BEFORE UPDATE OR DELETE ON jobs_auditentry
    FOR EACH ROW EXECUTE FUNCTION jobs_audit_stays();
"""
DROP = """
DROP TRIGGER jobs_audit_stays ON jobs_auditentry;
DROP FUNCTION jobs_audit_stays();
"""


def run(sql):
    """On PostgreSQL: SQLite's own file is whoever's who can write it."""

    def change(_apps, schema_editor):
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(sql)

    return change


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0092_baselines'),
    ]

    operations = [migrations.RunPython(run(MAKE), run(DROP))]
