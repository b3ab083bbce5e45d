from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Meshboard"

    def ready(self) -> None:
        from jobs.people import passwords, signing_on
        from jobs.people.notifications import closing
        from jobs.planning import checkpoints
        from jobs.runs.history.queries import results

        passwords.connect()
        signing_on.connect()
        closing.connect()
        checkpoints.register_reader(results.read_checkpoints)
