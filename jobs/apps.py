from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Meshboard"

    def ready(self) -> None:
        from jobs.history.told import checkpoints
        from jobs.people import passwords, signing_on
        from jobs.planning import saves
        from jobs.telling import closing

        passwords.connect()
        signing_on.connect()
        closing.connect()
        saves.read_with(checkpoints.history)
