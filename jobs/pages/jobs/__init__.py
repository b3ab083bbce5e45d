"""The pages of jobs: the list, one job, the comparison, and the forms of new jobs."""
