"""What runs on a host beside the training: Celery worker, supervisors, guardians. Only `launch` loads torch."""
