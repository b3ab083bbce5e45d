"""Collective lab: time, check and show each collective primitive. Modeled on nccl-tests."""
