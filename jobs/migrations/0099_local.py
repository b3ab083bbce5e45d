from django.db import migrations
class Migration(migrations.Migration):
    dependencies = [("jobs", "0070_recorded"), ("jobs", "0071_diagnosis"), ("jobs", "0072_tags_and_archive"), ("jobs", "0080_events_by_host")]
    operations = []
