"""The Django project, the controller's Celery app, and the one-command runner."""
