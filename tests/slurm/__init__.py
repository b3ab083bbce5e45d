"""A real Slurm on one machine, and what Meshboard makes of it. `make slurm`."""
