"""Hooks of schemathesis: bodies that make something, so that what is linked to it is asked too. Those drawn are mostly
refused for their arithmetic, and then nothing follows."""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import schemathesis

from tests.planner.wrong_specs import GOOD

WORKING: dict[str, dict[str, Any]] = {
    "submitJob": GOOD,
    "copyJob": {"name": "again"},
    "resumeJob": {"checkpoint": "step-00000010"},
    "makeProject": {},
    "makeWebhook": {"name": "chat", "url": "https://93.184.216.34/"},
    "invite": {"role": "viewer"},
    "openImport": {"files": [{"name": "rank0.json", "size": 10}]},
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A working body for two of three drawn."""
    working = WORKING.get(context.operation.definition.raw.get("operationId"))
    drawn = crc32(json.dumps(body, default=str, sort_keys=True).encode())
    if working is None or drawn % 3 == 0:
        return body
    named = {"name": f"drawn-{drawn}"} if working == {} else {}
    return {**working, **named}
