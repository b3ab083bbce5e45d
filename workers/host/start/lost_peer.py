"""What a rank says that lost a peer: the peer is the cause."""

from __future__ import annotations

import re

LOST_PEER = re.compile(
    r"(closed|reset) by peer|broken pipe|connection (was )?(closed|reset|aborted|timed out)"
    r"|no route to host|network is unreachable|timed out waiting",
    re.IGNORECASE,
)
