from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Meshboard"

    def ready(self) -> None:
        from jobs.people import sign_on, tokens
        from jobs.people.notifications import webhooks
        from jobs.planning import checkpoints
        from jobs.runs.history.queries import results

        tokens.connect_signals()
        sign_on.connect_signals()
        webhooks.connect_signals()
        checkpoints.register_reader(results.read_checkpoints)
