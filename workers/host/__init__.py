"""The host worker: Celery worker, supervisors, guardians, and launchers."""
