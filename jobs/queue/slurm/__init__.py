"""Slurm as an engine: sbatch on this machine or over SSH, squeue followed, our supervisor inside the allocation."""
