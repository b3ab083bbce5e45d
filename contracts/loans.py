"""How a host that has a checkpoint sends it to an attempt that runs on others.

The board picks the host and gives it and the attempt's first host a secret. Where it lends, the host tells at
`names.loan_key`, which that first host alone may read beside it; its supervisor hands a `Loan` to rank 0.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.fields import Address, AttemptNumber, Count, HostName, JobId, Number

Secret = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class LendOrder(TypedDict):
    """Send the newest checkpoint of a job, once, to whoever shows the secret."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber  # that goes on from it
    secret: Secret
    expires: Number  # unix seconds by Redis' clock; later the order is not carried out
    owner: NotRequired[Count]  # whose job it is, by number


class Loan(TypedDict):
    """Where to ask for it."""

    host: HostName
    address: Address
    port: Annotated[int, Field(ge=1, le=65535)]
    secret: Secret
