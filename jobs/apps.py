from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Meshboard"

    def ready(self) -> None:
        from jobs.people import passwords, signing_on

        passwords.connect()
        signing_on.connect()
