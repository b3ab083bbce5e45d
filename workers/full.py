"""How a disk says that it takes no more."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: BaseException | None) -> OSError | None:
    """The disk's own word in an error, or in what led to it: torch tells of it in words of its writer's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
