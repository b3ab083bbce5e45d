"""What is proven of a run: replicas agree, and one process computes the same."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import Count, Number, Rank, Seconds, Sentence, Word


class Mismatch(TypedDict):
    """Something that is not what it must be.

    `apart` is the rms of the difference over the rms of what it must be, None where that is no number; beyond `limit`
    it is more than rounding. `share` is a part of the model that nobody holds, or several do; `rows` are sequences that
    a rank trained on in place of its own, and `apart` how many of its share. A router's `choice` is apart by how much
    more probable what one process would have chosen was: a difference of logarithms over the rms of all experts'.
    """

    what: Literal["gradient", "weight", "share", "rows", "update", "loss", "gradient norm", "choice"]
    name: Word  # a tensor of the whole model, or "step 2", or "validation after step 2"
    axis: Word  # copies on ranks along it differ, as "dp" or "dp x tp"; "" beside one process
    ranks: Annotated[list[Rank], Field(max_length=2)]  # that differs, and from which
    apart: Seconds | None
    limit: Seconds


class ReplicaProof(TypedDict):
    """Checksums of gradients and weights, compared over all ranks that hold the same part of a tensor."""

    steps: Annotated[list[Count], Field(max_length=100)]  # after which they were compared
    parts: Count  # different parts of tensors there are
    copied: Count  # of these, held by two ranks or more
    apart: Seconds  # the largest difference of two copies; 0 is bit for bit


class Choices(TypedDict):
    """What routers chose for `tokens`, of all layers, in the first step compared; one process took the same.

    Of `turned` it would have chosen another expert, more probable by at most `gap`: a difference of logarithms over the
    rms of all experts' from their mean.
    """

    tokens: Count
    turned: Count
    gap: Seconds


class ProcessProof(TypedDict):
    """Steps, computed again by one process. Largest relative differences; `limit` is that of gradients."""

    state: Literal["due", "equal", "apart", "not checked"]
    why: Sentence  # of "not checked"; else the limits, and why no more steps were compared
    steps: Count  # that were compared; while it is due, the one after which that comes
    tensors: Count  # whose gradients and updates of the first of them were compared
    gradient: Seconds
    update: Seconds
    loss: Seconds
    norm: Seconds
    limit: Seconds
    seconds: Seconds  # what it took, training waiting
    choices: NotRequired[Choices]  # of a mixture


class ProofItem(TypedDict):
    """Rank 0: what is proven of this run so far; a later item replaces an earlier one."""

    kind: Literal["proof"]
    rank: Rank
    time: Number
    replicas: ReplicaProof
    one_process: ProcessProof  # the first steps of this run, from fresh values or the same checkpoint
    end: NotRequired[ProcessProof]  # one step more than the run has, from what it came to, and its last validation
    wrong: Annotated[list[Mismatch], Field(max_length=20)]  # the worst first; empty where all is well
