"""Queue, schedule, and control jobs."""
