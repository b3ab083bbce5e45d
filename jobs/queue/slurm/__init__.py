"""Run jobs on Slurm: submit and follow them here or over SSH, with a supervisor inside the allocation."""
