"""Each run proves itself: copies agree bit for bit, and the first steps are those of one process.

`checksum` and `replicas` compare what several ranks hold, `one_process` computes the steps again, `proof` says when.
"""

from workers.trainer.verification.verifier import Proof

__all__ = ["Proof"]
