"""Test Meshboard with a real Slurm on one machine."""
