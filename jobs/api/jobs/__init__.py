"""REST of jobs: lists, one job and what is done to it, and waiting for it."""
