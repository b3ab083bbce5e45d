from django.db import migrations


def forget(apps, schema_editor):
    """The planner reads version 2 alone: a host measured before is shown as not measured."""
    hosts = apps.get_model("jobs", "Host").objects.filter(profile__isnull=False)
    hosts.exclude(profile__version=2).update(profile=None, profiled=None)


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0002_host_profile'),
    ]

    operations = [migrations.RunPython(forget, migrations.RunPython.noop)]
