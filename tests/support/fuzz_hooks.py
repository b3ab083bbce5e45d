"""Schemathesis hooks with valid request bodies.

Valid requests create objects whose links the tests follow. Servers reject most generated bodies for their arithmetic.
"""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import schemathesis

from tests.planner.wrong_specs import GOOD

VALID_BODIES: dict[str, dict[str, Any]] = {
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
    """Replace two of three generated bodies with a valid one."""
    valid = VALID_BODIES.get(context.operation.definition.raw.get("operationId"))
    checksum = crc32(json.dumps(body, default=str, sort_keys=True).encode())
    if valid is None or checksum % 3 == 0:
        return body
    return {**valid, "name": f"drawn-{checksum}"} if valid == {} else valid
