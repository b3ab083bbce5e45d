"""Verification of a training run: replicas match, and the first steps match a single-process reference.

`shards` and `replicas` compare ranks. `reference` and `comparison` compute the steps again. `verifier` schedules the
comparisons.
"""

from workers.trainer.verification.verifier import RunVerifier

__all__ = ["RunVerifier"]
