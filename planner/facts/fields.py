"""What specs and requests are made of: a model that takes nothing it does not know, and texts that are safe to keep."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

JOB_ID = r"^[a-z0-9-]{1,16}$"
WORD = r"^[A-Za-z0-9][A-Za-z0-9._=-]*$"
JobId = Annotated[str, Field(pattern=JOB_ID)]
Word = Annotated[str, Field(min_length=1, max_length=63, pattern=WORD)]
NO_NUL = r"^[^\x00]*$"  # no database and no file name takes it


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
